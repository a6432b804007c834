"""Train a GPT: python train.py configs/quickstart.py [--optim.lr 1e-3 ...]; go on with it: python train.py runs/NAME.

What it would need: python train.py CONFIG --plan [GPU]. Several GPUs: torchrun --nproc-per-node 2 train.py CONFIG.
Read main and set_up at the bottom first, then train.
"""
import contextlib
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import config as configs
from config import Config
from data import prepare, tokenizer
from data.loader import Batch, Loader
from flash_attn2 import backends
from model import GPT
from runtime import checkpoint, flops, memory, parallel, plan, profile
from runtime.metrics import Metrics, environment, write_whole
from runtime.optimizer import Optimizer, learning_rate


@dataclass
class Job:
    """All that the loop needs. `model` is the module itself, `compute` that or DDP around it."""
    config: Config
    folder: Path
    ranks: parallel.Ranks
    dtype: torch.dtype
    model: GPT
    compute: nn.Module
    compiled: bool
    optimizer: Optimizer
    train_data: Loader
    val_data: Loader
    clock: flops.Clock
    metrics: Metrics | None = None      # rank 0's
    step: int = 0                       # optimizer steps done
    tokens: int = 0
    since_row: list[Tensor] = field(default_factory=list)   # (2,) summed nats and targets of each step since a row
    ahead: tuple[int, list[Batch]] = (-1, [])               # a step and its batches, read before their time

    @property
    def micro_steps(self) -> int:
        d = self.config.data
        return self.tokens_per_step // (d.batch * d.seq_len * self.ranks.world)

    @property
    def tokens_per_step(self) -> int:
        d = self.config.data
        return self.config.train.tokens_per_step or d.batch * d.seq_len * self.ranks.world


def train(job: Job) -> None:
    """Steps until train.max_steps, with a row, an evaluation and a checkpoint every so often."""
    t, every = job.config.train, job.config.log.every
    if job.compiled and t.max_steps - job.step > flops.UNMEASURED:      # a shorter run measures no speed
        warm_up(job)
    while job.step < t.max_steps:
        profiled = job.ranks.first and job.step + 1 == t.profile_step
        with profile.recorded(job.folder) if profiled else contextlib.nullcontext():
            norm, lr = train_step(job)
            if profiled:
                job.clock.settle()      # what recording has yet to do is no training
        job.step, job.tokens = job.step + 1, job.tokens + job.tokens_per_step
        last = job.step == t.max_steps
        if job.step % every == 0 or last or job.step == 1:
            log_train(job, norm, lr)
        if t.evaluate and (due(job.step, t.eval_every) or last):
            log(job, {"val/loss": evaluate(job, t.final_eval_tokens if last else t.eval_tokens)})
        if t.save and (due(job.step, t.checkpoint_every) or last):
            save(job)


def warm_up(job: Job) -> None:
    """Compiles what the loop will meet, before the clock runs: whole and packed rows, training and evaluation."""
    began = time.perf_counter()
    batch = job.train_data.batch(0, 0, job.ranks.rank, job.ranks.world)
    alone, packed = batch._replace(doc_start=None), batch._replace(doc_start=torch.zeros_like(batch.tokens).int())
    for variant in [alone, packed] if job.config.data.document_mask else [alone]:
        forward(job, job.compute, variant).backward()
        job.optimizer.zero_grad()
        with torch.no_grad():
            forward(job, without_ddp(job), variant)
    if job.ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(job.ranks.device)
    if job.ranks.first:
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)


def train_step(job: Job) -> tuple[Tensor, float]:
    """One optimizer step over all micro-batches and ranks, each target weighing the same. -> gradient norm, lr."""
    job.clock.start()
    ranks, batches = job.ranks, batches_of(job, job.step)
    targets = ranks.sum(ranks.send(torch.tensor(sum(int((b.targets >= 0).sum()) for b in batches))))
    total = torch.zeros((), device=ranks.device)
    for micro, batch in enumerate(batches):
        with no_sync(job, micro < len(batches) - 1):
            loss = forward(job, job.compute, batch)
            (loss * (ranks.world / targets.clamp(min=1))).backward()    # DDP averages over ranks: undo it
        total += loss.detach()
    lr = learning_rate(job.step, job.config)
    norm = job.optimizer.step(lr)
    if job.step + 1 < job.config.train.max_steps:       # while the GPU is at work
        with contextlib.suppress(ValueError, OSError):  # those are that step's, if it comes to it
            job.ahead = job.step + 1, batches_of(job, job.step + 1)
    job.since_row.append(torch.stack([ranks.sum(total), targets.float()]))
    job.clock.stop(job.tokens_per_step, step_flops(job, batches))
    return norm, lr


def batches_of(job: Job, step: int) -> list[Batch]:
    """This rank's micro-batches of a step."""
    if job.ahead[0] == step:
        return job.ahead[1]
    return [job.train_data.batch(step, micro, job.ranks.rank, job.ranks.world) for micro in range(job.micro_steps)]


def forward(job: Job, compute: nn.Module, batch: Batch) -> Tensor:
    """Summed nats of a batch."""
    tokens, targets, doc_start = (None if x is None else job.ranks.send(x) for x in batch)
    with torch.autocast(job.ranks.device.type, job.dtype, enabled=job.dtype != torch.float32):
        return compute(tokens, targets, doc_start)


@torch.no_grad()
def evaluate(job: Job, max_tokens: int) -> float:
    """Nats a token over held-out targets, each weighing the same; 0: all of them. The ranks share the rows."""
    job.clock.settle()
    if job.ranks.first and not max_tokens:
        print(f"evaluating on all {job.val_data.n_tokens:,} held-out tokens", flush=True)
    total = torch.zeros(2, dtype=torch.float64, device=job.ranks.device)
    for batch in job.val_data.sequential(max_tokens or None, job.ranks.rank, job.ranks.world):
        total[0] += forward(job, without_ddp(job), batch)
        total[1] += int((batch.targets >= 0).sum())
    nats, targets = job.ranks.sum(total).tolist()
    return nats / targets


def save(job: Job) -> None:
    job.clock.settle()
    if job.ranks.first:
        checkpoint.save(job.folder, job.step, dict(
            model=job.optimizer.weights(), optimizer=job.optimizer.state_dict(), step=job.step, tokens=job.tokens,
            since_row=[x.tolist() for x in job.since_row], random=checkpoint.random_state(job.ranks.device),
            wandb_id=job.metrics.wandb_id))
    job.ranks.barrier()


def log_train(job: Job, norm: Tensor, lr: float) -> None:
    """A row over the steps since the last one; reading the loss waits for the device, so the rates are whole."""
    rates = job.clock.rates()
    nats, targets = torch.stack(job.since_row).double().sum(0).tolist()
    job.since_row.clear()
    row = {"train/loss": nats / max(targets, 1), "train/grad_norm": norm.item(), "train/lr": lr, **rates}
    if job.ranks.device.type == "cuda":
        row["memory/peak_gib"] = torch.cuda.max_memory_allocated(job.ranks.device) / 2**30
    log(job, row)


def log(job: Job, row: dict) -> None:
    if job.metrics:
        job.metrics.log({"step": job.step, "tokens": job.tokens, **row})


def step_flops(job: Job, batches: list[Batch]) -> int:
    """Model FLOPs of a step over all ranks, the pairs really attended counted (this rank's, taken as the others')."""
    d, model = job.config.data, job.model
    pairs = {w: sum(flops.attended_pairs(b.doc_start, d.batch, d.seq_len, w) for b in batches)
             for w in set(model.windows)}
    tokens = d.batch * d.seq_len * len(batches)
    return job.ranks.world * flops.train_flops(model, tokens, [pairs[w] for w in model.windows])


def without_ddp(job: Job) -> nn.Module:
    """What computes, where ranks may differ in what they do: DDP would wait for them."""
    return job.compute.module if isinstance(job.compute, DistributedDataParallel) else job.compute


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def no_sync(job: Job, accumulating: bool):
    """DDP reduces gradients once a step, in the last micro-batch's backward."""
    ddp = accumulating and isinstance(job.compute, DistributedDataParallel)
    return job.compute.no_sync() if ddp else contextlib.nullcontext()


def set_up(path: Path, argv: list[str]) -> Job:
    """All that can be wrong is found here; the run folder is written last. ValueError: what the user can mend."""
    c = configs.load(path, argv)
    ranks = parallel.start(c.run.device)
    state = checkpoint.load(path) if path.is_dir() and checkpoint.steps(path) else None
    folder = checkpoint.run_folder(c, path)
    automatic = "bfloat16" if ranks.device.type == "cuda" else "float32"
    dtype = getattr(torch, automatic if c.train.dtype == "auto" else c.train.dtype)
    seed_everything(c)
    attention = make_attention(c, ranks, dtype)
    loaders = make_loaders(c, ranks)
    compiled = c.train.compile == "on" or (c.train.compile == "auto" and ranks.device.type == "cuda")
    run_block = memory.block_runner(c.train.checkpointing, offload=c.train.offload, compiled=compiled,
                                    mlp_chunk=c.train.mlp_chunk)
    with ranks.device:                                  # drawing 1.3B weights takes a CPU half a minute
        model = GPT(c.model, loaders["train_data"].vocab_size, c.data.seq_len, attention, run_block)
    if compiled:
        model.norm.compile(dynamic=False)
    peak = flops.peak_tflops(ranks.device_name, dtype, c.metrics.peak_tflops)
    compute = model if ranks.world == 1 else DistributedDataParallel(
        model, [ranks.device.index] if ranks.device.type == "cuda" else None)
    job = Job(c, folder, ranks, dtype, model, compute, compiled, make_optimizer(model, c, ranks, dtype),
              **loaders, clock=make_clock(model, c, ranks, peak[0]))
    if state:
        restore(job, state)
    if ranks.first:
        write_record(job, path, peak, state)
    return job


def make_attention(c: Config, ranks: parallel.Ranks, dtype: torch.dtype) -> backends.Attention:
    plain = not c.data.document_mask and "S" not in c.model.window_pattern
    name = backends.resolve(c.model.attention, ranks.device)
    attention = backends.build(name, ranks.device, dtype, c.model.d_model // c.model.n_head, plain=plain,
                               grouped=c.model.n_kv_head not in (0, c.model.n_head))
    if ranks.first:
        print(f"attention: {name}" + (" (auto)" if c.model.attention == "auto" else ""), flush=True)
    return attention


def make_loaders(c: Config, ranks: parallel.Ranks) -> dict[str, Loader]:
    """The two splits, prepared first where their shards are absent (by rank 0, while the others wait)."""
    d = c.data
    folder = Path(d.dir) if d.dir else prepare.shards_dir(d.source, d.tokenizer)
    step = d.batch * d.seq_len * ranks.world
    tokens = c.train.tokens_per_step or step
    if tokens % step:
        raise ValueError(f"train.tokens_per_step={tokens} must be a multiple of data.batch * data.seq_len * ranks = "
                         f"{step}")
    if ranks.first:
        prepare.prepare(d.source, d.tokenizer, folder, text_column=d.text_column, val_fraction=d.val_fraction)
    ranks.barrier()
    return {f"{split}_data": Loader(folder, split, seq_len=d.seq_len, batch=d.batch, tokens_per_step=tokens,
                                    seed=c.run.seed, document_mask=d.document_mask) for split in ("train", "val")}


def make_optimizer(model: GPT, c: Config, ranks: parallel.Ranks, dtype: torch.dtype) -> Optimizer:
    """Alone on a GPU the model computes from bfloat16 weights; DDP sums gradients in the weights' dtype."""
    half = dtype if dtype == torch.bfloat16 and ranks.device.type == "cuda" and ranks.world == 1 else None
    return Optimizer(model, c.optim, half=half, accumulates=c.train.tokens_per_step > c.data.batch * c.data.seq_len)


def make_clock(model: GPT, c: Config, ranks: parallel.Ranks, peak: float | None) -> flops.Clock:
    full = flops.per_token(model, c.data.seq_len)[1]
    synchronize = torch.cuda.synchronize if ranks.device.type == "cuda" else lambda: None
    return flops.Clock(world=ranks.world, peak_tflops=peak, full_flops_per_token=full, synchronize=synchronize)


def restore(job: Job, state: dict) -> None:
    """Weights, optimizer, position and random state of a checkpoint."""
    checkpoint.load_model(job.model, state["model"])
    job.optimizer.load_weights(state["model"])
    job.optimizer.load_state_dict(state["optimizer"])
    job.step, job.tokens = state["step"], state["tokens"]
    job.since_row = [torch.tensor(x, device=job.ranks.device) for x in state["since_row"]]
    checkpoint.restore_random_state(state["random"], job.ranks.device)


def write_record(job: Job, path: Path, peak: tuple[float | None, str], state: dict | None) -> None:
    """config.json, env.json and the metrics: from here on there is a run folder."""
    c, name, resumed = job.config, job.ranks.device_name, path.is_dir()
    dtype = str(job.dtype).removeprefix("torch.")
    env = environment(name, dtype, peak)
    job.folder.mkdir(parents=True, exist_ok=resumed or bool(c.run.dir))
    if resumed:                                         # the first part's environment stays, later ones stand below it
        first = json.loads((job.folder / "env.json").read_text())
        env = first | {"resumed": [*first.get("resumed", []), env]}
    write_whole(job.folder / "env.json", json.dumps(env, indent=2) + "\n")
    write_whole(job.folder / "config.json", configs.to_json(c))
    n_params = sum(p.numel() for p in job.model.parameters())
    start = f"resuming at step {job.step}" if resumed else "run"
    print(f"{start}: {job.folder} on {name}, {dtype}, {'compiled' if job.compiled else 'eager'}", flush=True)
    print(f"{n_params:,} parameters, {job.train_data.n_tokens:,} tokens, {job.tokens_per_step:,} a step", flush=True)
    if job.ranks.device.type == "cuda" and peak[0] is None:
        print(f"no MFU: {peak[1]}", flush=True)
    job.metrics = Metrics(job.folder, c, wandb_id=state["wandb_id"] if state else None,
                          resume_step=job.step if resumed else None, extra_config={"env": env, "n_params": n_params})


def seed_everything(c: Config) -> None:
    torch.manual_seed(c.run.seed)
    if c.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def on_paper(c: Config) -> GPT:
    """The model without its weights."""
    with torch.device("meta"):
        return GPT(c.model, tokenizer.get(c.data.tokenizer).vocab_size, c.data.seq_len, None)


def main(argv: list[str]) -> None:
    words, gpu = configs.take_plan(argv)
    if not words or words[0] in ("-h", "--help"):
        print(__doc__.strip() + "\nEvery flag: python train.py CONFIG --help")
        sys.exit(0 if argv else 2)
    path, job, done = Path(words[0]), None, False
    if gpu is not None:
        with configs.one_line_errors():
            c = configs.load(path, words[1:])
            here = torch.cuda.get_device_name() if torch.cuda.is_available() else "H200"
            print(plan.report(c, gpu or here, on_paper(c)))
        return
    try:
        with configs.one_line_errors():
            job = set_up(path, words[1:])
        if job.step >= job.config.train.max_steps:
            print(f"{job.folder} has done its {job.step} steps; --train.max-steps N adds some", flush=True)
        train(job)
        done = True
    except torch.OutOfMemoryError:
        c, when = (job.config, f"after step {job.step}") if job else (configs.load(path, words[1:]), "at the start")
        world = int(os.environ.get("WORLD_SIZE", 1))
        print(f"error: out of GPU memory {when}. {plan.advice(c, on_paper(c), world)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(f"interrupted at step {job.step if job else 0}"
              + (f"; go on with it: python train.py {job.folder}" if job and job.config.train.save else ""))
        sys.exit(130)
    finally:
        if job and job.metrics:
            job.metrics.close(exit_code=0 if done else 1)
        parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Train a GPT: python train.py configs/quickstart.py [--optim.lr 1e-3 ...]; go on with it: python train.py runs/NAME.

Several GPUs: torchrun --nproc-per-node 2 train.py CONFIG. Read main and set_up at the bottom first, then train.
"""
import contextlib
import json
import math
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
from data import prepare
from data.loader import Batch, Loader
from flash_attn2 import backends
from model import GPT, parameter_groups
from runtime import checkpoint, flops, parallel
from runtime.metrics import Metrics, environment, write_whole

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass
class Job:
    """All that the loop needs. `model` is the module itself, `compute` what runs: compiled, in DDP, or the same."""
    config: Config
    folder: Path
    ranks: parallel.Ranks
    dtype: torch.dtype
    model: GPT
    compute: nn.Module
    compiled: bool
    optimizer: torch.optim.Optimizer
    train_data: Loader
    val_data: Loader
    clock: flops.Clock
    metrics: Metrics | None = None      # rank 0's
    step: int = 0                       # optimizer steps done
    tokens: int = 0
    since_row: list[Tensor] = field(default_factory=list)   # (2,) summed nats and targets of each step since a row

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
    if job.compiled and job.step < t.max_steps:
        warm_up(job)
    while job.step < t.max_steps:
        norm, lr = train_step(job)
        job.step, job.tokens = job.step + 1, job.tokens + job.tokens_per_step
        last = job.step == t.max_steps
        if job.step % every == 0 or last or job.step == 1:
            log_train(job, norm, lr)
        if due(job.step, t.eval_every) or last:
            log(job, {"val/loss": evaluate(job, t.final_eval_tokens if last else t.eval_tokens)})
        if due(job.step, t.checkpoint_every) or last:
            save(job)


def warm_up(job: Job) -> None:
    """Compiles what the loop will meet, before the clock runs: whole and packed rows, training and evaluation."""
    began = time.perf_counter()
    batch = job.train_data.batch(0, 0, job.ranks.rank, job.ranks.world)
    alone, packed = batch._replace(doc_start=None), batch._replace(doc_start=torch.zeros_like(batch.tokens).int())
    for variant in [alone, packed] if job.config.data.document_mask else [alone]:
        forward(job, job.compute, variant).backward()
        with torch.no_grad():
            forward(job, without_ddp(job), variant)
    job.optimizer.zero_grad(set_to_none=True)
    if job.ranks.first:
        print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)


def train_step(job: Job) -> tuple[Tensor, float]:
    """One optimizer step over all micro-batches and ranks, each target weighing the same. -> gradient norm, lr."""
    job.clock.start()
    c, ranks = job.config, job.ranks
    batches = [job.train_data.batch(job.step, micro, ranks.rank, ranks.world) for micro in range(job.micro_steps)]
    targets = ranks.sum(torch.tensor(sum(int((b.targets >= 0).sum()) for b in batches), device=ranks.device))
    total = torch.zeros((), device=ranks.device)
    for micro, batch in enumerate(batches):
        with no_sync(job, micro < len(batches) - 1):
            loss = forward(job, job.compute, batch)
            (loss * (ranks.world / targets.clamp(min=1))).backward()    # DDP averages over ranks: undo it
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(job.model.parameters(), c.optim.grad_clip or math.inf)
    lr = learning_rate(job.step, c)
    for group in job.optimizer.param_groups:
        group["lr"] = lr
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=True)
    job.since_row.append(torch.stack([ranks.sum(total), targets.float()]))
    job.clock.stop(job.tokens_per_step, step_flops(job, batches))
    return norm, lr


def forward(job: Job, compute: nn.Module, batch: Batch) -> Tensor:
    """Summed nats of a batch."""
    device = job.ranks.device
    tokens, targets, doc_start = (None if x is None else x.to(device) for x in batch)
    with torch.autocast(device.type, job.dtype, enabled=job.dtype != torch.float32):
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
            model=job.model.state_dict(), optimizer=job.optimizer.state_dict(), step=job.step, tokens=job.tokens,
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


def learning_rate(step: int, c: Config) -> float:
    """Of the step after `step` steps: a linear rise over warmup_steps, then a cosine down to min_lr."""
    o = c.optim
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    done = (step - o.warmup_steps) / max(1, c.train.max_steps - 1 - o.warmup_steps)
    return o.min_lr + (o.lr - o.min_lr) * (1 + math.cos(math.pi * min(done, 1.0))) / 2


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
    folder = run_folder(c, path)
    dtype = DTYPES["bfloat16" if ranks.device.type == "cuda" else "float32"] if c.train.dtype == "auto" \
        else DTYPES[c.train.dtype]
    seed_everything(c)
    attention = make_attention(c, ranks, dtype)
    loaders = make_loaders(c, ranks)
    model = GPT(c.model, loaders["train_data"].vocab_size, c.data.seq_len, attention).to(ranks.device)
    optimizer = torch.optim.AdamW(parameter_groups(model, c.optim.weight_decay), lr=c.optim.lr,
                                  betas=(c.optim.beta1, c.optim.beta2), eps=c.optim.eps, fused=True)
    peak = flops.peak_tflops(device_name(ranks), dtype, c.metrics.peak_tflops)
    compiled = c.train.compile == "on" or (c.train.compile == "auto" and ranks.device.type == "cuda")
    job = Job(c, folder, ranks, dtype, model, computing(model, compiled, ranks), compiled, optimizer, **loaders,
              clock=make_clock(model, c, ranks, peak[0]))
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


def computing(model: GPT, compiled: bool, ranks: parallel.Ranks) -> nn.Module:
    """The model as it runs: compiled, and wrapped for several ranks."""
    compute = torch.compile(model, dynamic=False) if compiled else model
    if ranks.world > 1:
        compute = DistributedDataParallel(compute, [ranks.device.index] if ranks.device.type == "cuda" else None)
    return compute


def make_clock(model: GPT, c: Config, ranks: parallel.Ranks, peak: float | None) -> flops.Clock:
    n_params = sum(p.numel() for p in model.parameters())
    if model.positions is not None:
        n_params -= model.positions.weight.numel()
    full = flops.full_flops_per_token(n_params, c.model.n_layer, c.model.d_model, c.data.seq_len)
    synchronize = torch.cuda.synchronize if ranks.device.type == "cuda" else lambda: None
    return flops.Clock(world=ranks.world, peak_tflops=peak, full_flops_per_token=full, synchronize=synchronize)


def restore(job: Job, state: dict) -> None:
    """Weights, optimizer, position and random state of a checkpoint."""
    checkpoint.load_model(job.model, state["model"])
    settings = [{k: v for k, v in group.items() if k != "params"} for group in job.optimizer.param_groups]
    job.optimizer.load_state_dict(state["optimizer"])
    for group, ours in zip(job.optimizer.param_groups, settings, strict=True):
        group.update(ours)                              # the config's, which the command line may have changed
    job.step, job.tokens = state["step"], state["tokens"]
    job.since_row = [torch.tensor(x, device=job.ranks.device) for x in state["since_row"]]
    checkpoint.restore_random_state(state["random"], job.ranks.device)


def write_record(job: Job, path: Path, peak: tuple[float | None, str], state: dict | None) -> None:
    """config.json, env.json and the metrics: from here on there is a run folder."""
    c, name, resumed = job.config, device_name(job.ranks), path.is_dir()
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


def run_folder(c: Config, path: Path) -> Path:
    """The folder that is resumed, the one asked for, or the first free runs/NAME. ValueError: it is taken."""
    if path.is_dir():
        changed = configs.differences(configs.from_json(path / "config.json"), c)
        for one in changed:
            if one.startswith(("model.", "run.dir ")) and not one.startswith("model.attention "):
                raise ValueError(f"{path} cannot go on as another run: {one}")
        print("".join(f"changed: {one}\n" for one in changed), end="", flush=True)
        return path
    if c.run.dir:
        folder = Path(c.run.dir)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"run.dir={c.run.dir!r} is not empty: go on with it (python train.py {c.run.dir}) or "
                             "choose another")
        return folder
    name = c.run.name or path.stem
    taken = (Path("runs") / (name if i == 1 else f"{name}-{i}") for i in range(1, 10**6))
    return next(folder for folder in taken if not folder.exists())


def device_name(ranks: parallel.Ranks) -> str:
    return torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else "cpu"


def seed_everything(c: Config) -> None:
    torch.manual_seed(c.run.seed)
    if c.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def main(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__.strip() + "\nEvery flag: python train.py CONFIG --help")
        sys.exit(0 if argv else 2)
    with configs.one_line_errors():
        job = set_up(Path(argv[0]), argv[1:])
    done = False
    try:
        if job.step >= job.config.train.max_steps:
            print(f"{job.folder} has done its {job.step} steps; --train.max-steps N adds some", flush=True)
        train(job)
        done = True
    except KeyboardInterrupt:
        print(f"interrupted at step {job.step}; go on with it: python train.py {job.folder}")
        sys.exit(130)
    finally:
        if job.metrics:
            job.metrics.close(exit_code=0 if done else 1)
        parallel.stop()


if __name__ == "__main__":
    main(sys.argv[1:])

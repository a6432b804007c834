"""Text from a run's newest checkpoint: python sample.py runs/quickstart --prompt "It is a truth".

On a GPU through the attention that the run was trained with; on a CPU through sdpa, whatever that was.
"""
import argparse
import sys
from pathlib import Path

import torch

import config as configs
from data import tokenizer
from flash_attn2 import backends
from model import GPT
from runtime import checkpoint


def load(run: Path, device: torch.device):
    """A run's GPT, its tokenizer and the length of its rows. ValueError: no such run, or none of its checkpoints."""
    c = configs.from_json(run / "config.json")
    state = checkpoint.load(run, device)
    gpu = device.type == "cuda"
    attention = backends.build(c.model.attention if gpu else "sdpa", device, torch.bfloat16 if gpu else torch.float32,
                               c.model.d_model // c.model.n_head, plain="S" not in c.model.window_pattern,
                               grouped=c.model.n_kv_head not in (0, c.model.n_head))
    text = tokenizer.get(c.data.tokenizer)
    model = GPT(c.model, text.vocab_size, c.data.seq_len, attention).to(device)
    checkpoint.load_model(model, state["model"])
    return model.eval(), text, c.data.seq_len


@torch.no_grad()
def generate(model: GPT, tokens: list[int], n: int, seq_len: int, temperature: float, top_k: int, end_id: int):
    """Yields n sampled ids, or fewer if the text ends. Each one reads the last seq_len tokens again: no cache yet."""
    device = model.embed.weight.device
    for _ in range(n):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(torch.tensor([tokens[-seq_len:]], device=device))[0, -1] / temperature
        if top_k:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = float("-inf")
        token = int(torch.multinomial(logits.softmax(-1), 1))
        if token == end_id:
            return
        tokens = [*tokens, token]
        yield token


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--prompt", default="It is a truth universally acknowledged")
    parser.add_argument("--tokens", type=int, default=500, help="how many to add")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-k", type=int, default=50, help="sample among the likeliest k; 0: among all")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    with configs.one_line_errors():
        if not 0.01 <= args.temperature <= 100 or not args.prompt:
            raise ValueError(f"--temperature={args.temperature} must lie between 0.01 and 100, "
                             f"--prompt={args.prompt!r} not be empty")
        if args.tokens < 0 or args.top_k < 0:
            raise ValueError(f"--tokens={args.tokens} and --top-k={args.top_k} must not be negative")
        model, text, seq_len = load(args.run, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        torch.manual_seed(args.seed)
    prompt = text.encode(args.prompt).tolist()
    sampled = generate(model, prompt, args.tokens, seq_len, args.temperature, args.top_k, text.end_id)
    print(text.decode([*prompt, *sampled]))


if __name__ == "__main__":
    main(sys.argv[1:])

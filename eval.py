"""
Look at a trained model and score it.

    python eval.py bpb CKPT --data PATH                 bits per byte of a file, folder or glob, late and early
    python eval.py all CKPT                             hellaswag, arc_easy, piqa and lambada (or one of these), and bpb
    python eval.py boundaries CKPT --text "some text"   where it cuts; --html FILE draws a heat map, --json FILE lists p
    python eval.py sample CKPT --prompt "Once" --bytes 300
    python eval.py compare out/RUN...                   finished runs side by side, grouped by setting; --plot FILE

CKPT is a run's folder or its ckpt.pt. Boundaries are greedy (p >= 1/2) unless said otherwise. Text longer than the
model's row is read row by row, each without memory of the one before; scoring is in fp32 whatever the training used.
bpb and the tasks also run under torchrun, with the same result for any number of ranks.
"""
import argparse
import codecs
import html
import json
import math
import os
import re
import sys
import time
import zipfile
import zlib
from dataclasses import fields
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from data import REPO, Corpus, check_hash, expand, fail, fetch, load
from model import NO_TARGET, SEPARATOR, ByteLM, ModelConfig, all_sum, flops_per_byte, nll

WHITESPACE = torch.zeros(257, dtype=torch.bool)
WHITESPACE[[9, 10, 11, 12, 13, 32]] = True


# ---------------------------------------------------------------------------------------------------------------------
# checkpoints

def read_checkpoint(path):
    """A run's folder or a checkpoint file -> dict of tensors and plain values; SystemExit(2) where it cannot be read."""
    path = Path(path)
    try:
        path = path / "ckpt.pt" if path.is_dir() else path
        if not path.exists():
            fail(f"no checkpoint: {path}; train one with: python train.py")
        with zipfile.ZipFile(path) as z:   # torch.load does not look at check sums
            if z.testzip():
                raise ValueError("a check sum is wrong")
        ckpt = torch.load(path, map_location="cpu", weights_only=True)   # never runs code from the file
        kinds = dict(model=dict, optimizer=dict, step=int, row=int, place=list, config=dict)
        if not all(isinstance(ckpt[k], kind) for k, kind in kinds.items()) or min(
                ckpt["step"], ckpt["row"], *ckpt["place"]) < 0 or len(ckpt["place"]) != 3:
            raise ValueError("its parts are not what they should be")
        for f in fields(ModelConfig):
            if type(ckpt["config"][f.name]) is not f.type:
                raise ValueError(f"its setting {f.name} is not {f.type.__name__}")
        if not all(isinstance(w, torch.Tensor) and w.isfinite().all() for w in ckpt["model"].values()):
            raise ValueError("its weights are not all finite numbers")
        return ckpt
    except Exception as e:   # a broken file can break torch.load in many ways; all of them mean the same here
        before = path.with_name("previous.pt")
        fail(f"not a readable checkpoint: {path} ({str(e).splitlines()[0] if str(e) else type(e).__name__}); it may be damaged or "
             f"from another program" + (f"; the one before it is {before}: copy it here to go on from there" if before.exists() else ""))


def load_weights(model, weights, path):
    """Copy weights into model; SystemExit(2) when they belong to another shape of model."""
    shape = lambda state, k: tuple(state[k].shape) if k in state else "missing"
    mine = model.state_dict()
    bad = [k for k in sorted(mine.keys() | weights.keys()) if shape(mine, k) != shape(weights, k)]
    if bad:
        fail(f"{path} holds another shape of model: {bad[0]} is {shape(weights, bad[0])} there, {shape(mine, bad[0])} here "
             f"({len(bad)} differ); use the settings it was trained with")
    model.load_state_dict(weights)


def find_device(name):
    """torch.device of that name; SystemExit(2) where this machine has none. auto = cuda where there is one, else cpu."""
    has = dict(cpu=True, cuda=torch.cuda.is_available(), mps=torch.backends.mps.is_available())
    name = ("cuda" if has["cuda"] else "cpu") if name == "auto" else name
    if not has.get(name):
        fail(f"--device {name}: not on this machine; choose one of auto, {', '.join(k for k in has if has[k])}")
    return torch.device(name)


def load_model(path, device):
    """-> model in evaluation mode, its whole config (dict)."""
    ckpt = read_checkpoint(path)
    try:
        model = ByteLM(ModelConfig(**{f.name: ckpt["config"][f.name] for f in fields(ModelConfig)}))
        if not 1 < ckpt["config"]["row_bytes"] < 1e9:
            raise ValueError("row_bytes")
    except Exception as e:
        fail(f"{path} has settings that make no model ({type(e).__name__}: {e})")
    load_weights(model, ckpt["model"], path)
    return model.eval().to(device), ckpt["config"]


# ---------------------------------------------------------------------------------------------------------------------
# bits per byte and where boundaries fall

@torch.no_grad()
def evaluate(model, corpus, T, batch_rows=32, max_rows=0, rank=0, world=1):
    """Bits per byte and boundary statistics over a whole corpus (or its first max_rows rows of T), on all ranks.

    Sums over bytes, divided once, so that batch size, padding and ranks do not matter. A word-end is a whitespace byte
    after a byte that is not; a boundary is inside a character when a UTF-8 continuation byte follows it.
    """
    device = next(model.parameters()).device
    first = corpus.row_starts(T)
    first = first[:max_rows or len(first)][rank::world]
    total = torch.zeros(12, dtype=torch.float64)
    noise = torch.rand(T, generator=torch.Generator().manual_seed(0))
    for i in range(0, len(first), batch_rows):
        x, y, token_start = corpus.window(first[i:i + batch_rows], T)
        number = torch.from_numpy(first[i:i + batch_rows] // T)[:, None]
        u = ((noise + 0.618034 * number) % 1).to(device)                              # each row its own, always the same
        out = model(x.to(device), u=u if model.chunker.by_chance else None,
                    token_start=None if token_start is None else token_start.to(device))
        late, early = nll(out["logits"], y.to(device)).sum(), nll(out["early_logits"], y.to(device)).sum()
        a, greedy, sampled = (t.cpu() for t in (out["a"], model.chunker.sample(out["v"], None), model.chunker.sample(out["v"], u)))
        byte = (x != SEPARATOR) & (y != NO_TARGET).flip(1).cumsum(1).flip(1).bool()   # text, not padding
        byte[:, 0] = False                                                            # its boundary is forced
        word_end = byte & WHITESPACE[x] & ~WHITESPACE[x.roll(1, 1)] & (x.roll(1, 1) != SEPARATOR)
        inside = byte & (y >= 128) & (y < 192)
        other = byte & ~word_end
        counts = [y != NO_TARGET, byte, greedy & byte, sampled & byte, word_end, a & word_end, other, a & other, a & inside, a & byte]
        total += torch.stack([late.cpu().double(), early.cpu().double()] + [c.sum().double() for c in counts])
    late, early, targets, n_byte, greedy, drawn, ends, end_hits, others, other_hits, inside, used = all_sum(total).tolist()
    share = lambda a, b: a / b if b else float("nan")
    return dict(bpb=share(late, targets) / math.log(2), early_bpb=share(early, targets) / math.log(2),
                bytes=int(targets), greedy_rate=share(greedy, n_byte), sampled_rate=share(drawn, n_byte),
                word_end=share(end_hits, ends), other=share(other_hits, others), inside_char=share(inside, used))


@torch.no_grad()
def boundaries(model, text, T, batch_rows=32):
    """p (n,) float and a (n,) bool, the greedy boundary, for each of n bytes of text, in rows of T-1 bytes."""
    corpus = Corpus(np.frombuffer(text, dtype=np.uint8))
    if model.cfg.chunker == "bpe":
        corpus.mark_tokens()
    device = next(model.parameters()).device
    p, a = [], []
    first = np.arange(0, len(text), T - 1)
    for i in range(0, len(first), batch_rows):
        x, _, token_start = corpus.window(first[i:i + batch_rows], T)
        out = model(x.to(device), token_start=None if token_start is None else token_start.to(device))
        p.append(out["p"][:, 1:].flatten().cpu())
        a.append(out["a"][:, 1:].flatten().cpu())
    return torch.cat(p)[:len(text)], torch.cat(a)[:len(text)]


def characters(text):
    """Bytes -> [(what to show, number of bytes)], one entry a character; bytes that are no UTF-8 show as \\xNN."""
    shown = text.decode("utf-8", "surrogateescape")
    return [(f"\\x{ord(c) - 0xDC00:02x}", 1) if "\udc80" <= c <= "\udcff" else (c, len(c.encode())) for c in shown]


def cut(text, a, one_line=False):
    """Text with `|` after each character in which a boundary falls. text bytes, a (n,) bool -> str."""
    out, i = [], 0
    for c, n in characters(text):
        if one_line:
            c = SHOWN.get(c, c) if c != " " else c
        out.append(c + ("|" if any(a[i:i + n]) else ""))
        i += n
    return "".join(out)


# ---------------------------------------------------------------------------------------------------------------------
# benchmarks: which of some continuations of a context is the right one?

# file: (where it comes from, how its sha256 starts); the zip is read member by member, never unpacked
SOURCES = {
    "hellaswag_val.jsonl": ("https://raw.githubusercontent.com/rowanz/hellaswag/master/data/hellaswag_val.jsonl", "0aa3b888"),
    "ARC-V1-Feb2018.zip": ("https://ai2-public-datasets.s3.amazonaws.com/arc/ARC-V1-Feb2018.zip", ""),
    "piqa_valid.jsonl": ("https://ybisk.github.io/piqa/data/valid.jsonl", "93503cc9"),
    "piqa_valid-labels.lst": ("https://ybisk.github.io/piqa/data/valid-labels.lst", "b4192dc3"),
    "lambada_test.jsonl": ("https://openaipublic.blob.core.windows.net/gpt-2/data/lambada_test.jsonl", "4aa8d02c"),
}


def lines(folder, name):
    """The parsed lines of a benchmark's file, which is in folder or fetched into it."""
    path = folder / name
    if name == "ARC-Easy-Test.jsonl" and not path.exists():
        archive = fetch(SOURCES["ARC-V1-Feb2018.zip"][0], folder / "ARC-V1-Feb2018.zip", lambda part, _: zipfile.ZipFile(part).close())
        with zipfile.ZipFile(archive) as z:
            text = z.read("ARC-V1-Feb2018-2/ARC-Easy/ARC-Easy-Test.jsonl")
    else:
        if not path.exists():
            url, sha256 = SOURCES[name]
            fetch(url, path, lambda part, _: check_hash(part, sha256))
        text = path.read_bytes()
    return [json.loads(line) for line in text.splitlines() if line.strip()]


def hellaswag(folder):
    def clean(text):   # as lm-evaluation-harness: how-to titles become sentences, bracket markers go
        return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")
    for row in lines(folder, "hellaswag_val.jsonl"):
        context = clean(f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}")
        yield row["ind"], context, [" " + clean(e) for e in row["endings"]], int(row["label"])


def arc_easy(folder):
    for row in lines(folder, "ARC-Easy-Test.jsonl"):
        choices = row["question"]["choices"]
        gold = [c["label"] for c in choices].index(row["answerKey"])   # letters or digits
        yield row["id"], f"Question: {row['question']['stem']}\nAnswer:", [" " + c["text"] for c in choices], gold


def piqa(folder):
    for k, (row, gold) in enumerate(zip(lines(folder, "piqa_valid.jsonl"), lines(folder, "piqa_valid-labels.lst"), strict=True)):
        yield k, f"Question: {row['goal']}\nAnswer:", [" " + row["sol1"], " " + row["sol2"]], gold


def lambada(folder):
    for k, row in enumerate(lines(folder, "lambada_test.jsonl")):
        context, word = row["text"].rsplit(" ", 1)
        yield k, context, [" " + word], 0


TASKS = dict(hellaswag=hellaswag, arc_easy=arc_easy, piqa=piqa, lambada=lambada)


@torch.no_grad()
def score(model, pairs, batch_size):
    """Score continuations. pairs: (context, option) bytes -> a list of (nats of the option, whether each of its bytes is
    the likeliest, boundaries in the whole), in the same order. Similar lengths go together; padding does not matter."""
    device = next(model.parameters()).device
    order = sorted(range(len(pairs)), key=lambda k: len(pairs[k][0]) + len(pairs[k][1]))
    out = [None] * len(pairs)
    for i in range(0, len(order), batch_size):
        some = [pairs[k] for k in order[i:i + batch_size]]
        T = len(some[-1][0]) + len(some[-1][1])
        y = torch.full((len(some), T), NO_TARGET)
        x = torch.full((len(some), T), SEPARATOR)
        starts = torch.zeros(len(some), T, dtype=torch.bool)   # of tokens, for bpe
        for r, (context, option) in enumerate(some):
            text = torch.frombuffer(bytearray(context + option), dtype=torch.uint8).long()
            x[r, 1:len(text)] = text[:-1]
            y[r, len(context):len(text)] = text[len(context):]
            if model.cfg.chunker == "bpe":
                marks = Corpus(text.numpy().astype(np.uint8)).mark_tokens().token_start
                starts[r, 1:len(text)] = torch.from_numpy(marks)[:-1]
        x, y = x.to(device), y.to(device)
        result = model(x, token_start=starts.to(device))
        nats = nll(result["logits"], y).cpu().double().sum(1).tolist()
        greedy = ((result["logits"].argmax(-1) == y) | (y == NO_TARGET)).all(1).tolist()
        for r, k in enumerate(order[i:i + batch_size]):
            n = len(some[r][0]) + len(some[r][1])
            out[k] = nats[r], greedy[r], int(result["a"][r, :n].sum())
    return out


def questions_of(task, args, rank, world):
    """All questions of a task; rank 0 reads them, so that all ranks have the same or fail alike."""
    told = [None]
    if rank == 0:
        try:
            told[0] = list(TASKS[task](Path(args.bench_dir)))[:args.limit or None] or "its file is empty"
        except SystemExit as e:
            told[0] = e.reason
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile, zlib.error) as e:
            told[0] = f"cannot read its file in {args.bench_dir} ({type(e).__name__}: {e}); remove it, and it is fetched again"
    if world > 1:
        dist.broadcast_object_list(told)
    return told[0]


def run_task(model, config, args, task, questions, rank, world):
    """-> one result a question, of all ranks: dict(task, id, context, options, gold, nll, bytes, greedy, boundaries, total)."""
    questions = questions[rank::world]
    results, begin = [], time.monotonic()
    for i in range(0, len(questions), 64):
        some, pairs = questions[i:i + 64], []
        for _, context, options, _ in some:
            options = [o.encode() for o in options]
            room = max(0, config["row_bytes"] - max(map(len, options)))   # the context is cut from the left, an option never
            context = context.encode()
            pairs += [(context[max(0, len(context) - room):], o) for o in options]
        scores = iter(score(model, pairs, args.batch_size))
        pairs = iter(pairs)
        for name, context, options, gold in some:
            s = [next(scores) for _ in options]
            results.append(dict(task=task, id=name, context=context, options=options, gold=gold, nll=[x[0] for x in s],
                                bytes=[len(o.encode()) for o in options], greedy=[x[1] for x in s], boundaries=sum(x[2] for x in s),
                                total=sum(len(c) + len(o) for c, o in (next(pairs) for _ in options))))
        if rank == 0 and sys.stderr.isatty():
            done = len(results)
            print(f"\r{task}: {done} of {len(questions)}, {(time.monotonic() - begin) / done * (len(questions) - done):.0f} s left  ",
                  end="" if done < len(questions) else "\n", file=sys.stderr, flush=True)
    if world > 1:
        parts = [None] * world
        dist.all_gather_object(parts, results)
        results = [parts[k % world][k // world] for k in range(sum(map(len, parts)))]   # in the order of the file
    return results


def summarise(results):
    """Results of one task -> its figures. Bits per byte: nats of the right options over their bytes, +- standard error."""
    best = lambda r, size: int(np.argmin([n / max(1, size(o)) for n, o in zip(r["nll"], r["options"])]))
    one = len(results[0]["options"]) == 1   # lambada: nothing to choose from; right = every byte is the likeliest
    right = lambda size: float(np.mean([r["greedy"][0] if one else best(r, size) == r["gold"] for r in results]))
    nats, size = (np.array([r[k][r["gold"]] for r in results]) for k in ("nll", "bytes"))
    rate, n = nats.sum() / size.sum(), len(results)
    error = math.sqrt(((nats - rate * size) ** 2).sum() * n / max(1, n - 1)) / size.sum()   # of a ratio of sums
    return dict(n=n, accuracy=right(lambda o: 1), acc_bytes=right(lambda o: len(o.encode())), acc_chars=right(lambda o: len(o) - 1),
                bpb=rate / math.log(2), bpb_error=error / math.log(2), word_perplexity=float(np.exp(nats.mean())) if one else None,
                chunks_per_byte=sum(r["boundaries"] for r in results) / sum(r["total"] for r in results))


def command_tasks(args, model, config, rank, world):
    names = list(TASKS) if args.command == "all" else [args.command]
    found, skipped, dump = {}, [], []
    for name in names:
        questions = questions_of(name, args, rank, world)
        if isinstance(questions, str):   # the reason why there are none; the other tasks go on
            skipped.append([name, f"skipped: {questions}"] + [""] * 6)
            continue
        results = run_task(model, config, args, name, questions, rank, world)
        found[name] = summarise(results)
        dump += results
    if rank == 0:
        number = lambda x: f"{x:.3f}"
        note = " (guidance: looks ahead)" if model.cfg.chunker == "bpe" else ""
        table(["task", "n", "accuracy", "by bytes", "by characters", "bits per byte", "perplexity a word", "chunks a byte"],
              [[k + note, str(r["n"]), number(r["accuracy"]), number(r["acc_bytes"]), number(r["acc_chars"]),
                f"{r['bpb']:.3f} ± {r['bpb_error']:.3f}", "-" if r["word_perplexity"] is None else f"{r['word_perplexity']:.4g}", number(r["chunks_per_byte"])]
               for k, r in found.items()] + skipped)
        if args.dump:
            keys = ("task", "id", "context", "options", "gold", "nll", "bytes", "greedy")
            write_text(args.dump, "".join(json.dumps({k: r[k] for k in keys}) + "\n" for r in dump))
        if args.json:
            write_text(args.json, json.dumps(found, indent=1) + "\n")
    if args.command == "all":
        command_bpb(args, model, config, rank, world)
    if skipped:
        raise SystemExit(1)


# ---------------------------------------------------------------------------------------------------------------------
# heat map

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Boundaries: {title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1b1b1f; --paper: #fff; --faint: #5c5c66; --cut: #b00040; --heat: 255, 140, 0; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #f2f2f6; --paper: #17171b; --faint: #a5a5b0; --cut: #ff7fa8; --heat: 225, 110, 0; }} }}
body {{ font: 16px/1.9 ui-monospace, Menlo, Consolas, monospace; color: var(--ink); background: var(--paper);
  max-width: 60em; margin: 2em auto; padding: 0 1em; }}
h1 {{ font-size: 1.2em; }} .note {{ font-size: 0.85em; color: var(--faint); }} td {{ padding-right: 2em; }}
#text {{ white-space: pre-wrap; overflow-wrap: anywhere; margin-top: 1.5em; }}
span {{ padding: 0.15em 0; color: var(--ink); }} .b {{ border-right: 2px solid var(--cut); }} .w {{ color: color-mix(in srgb, var(--ink) 65%, transparent); }}
{levels}
</style></head><body><h1>Boundaries: {title}</h1>
<p class="note">The stronger a character's colour, the likelier a boundary after it: {legend}
A line on its right is a boundary that was chosen. Hover for numbers.</p>
<table class="note">{rows}</table>
<div id="text">{body}</div></body></html>
"""
SHOWN = {" ": "\u00b7", "\n": "\u23ce", "\t": "\u2192", "\r": "\u240d"}   # white space, made visible


def heat_map(text, p, a, title, table):
    """A self-contained HTML page: every character shaded by its boundary probability, chosen boundaries as lines."""
    body, i = [], 0
    for c, n in characters(text):
        here, chosen = p[i:i + n], any(a[i:i + n])
        level = round(10 * max(here))
        shown = SHOWN.get(c, c if c.isprintable() else repr(c)[1:-1])
        kind = f"h{level}" + (" b" if chosen else "") + (" w" if c.isspace() else "")
        note = f"byte {i}: p = " + " ".join(f"{q:.3f}" for q in here)
        body.append(f'<span class="{kind}" title="{note}">{html.escape(shown)}</span>' + ("\n" if c == "\n" else ""))
        i += n
    levels = "\n".join(f".h{k} {{ background: rgba(var(--heat), {0.07 * k:.2f}); }}" for k in range(11))
    legend = "".join(f'<span class="h{k}">&nbsp;{k / 10:g}&nbsp;</span>' for k in range(0, 11, 2))
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in table)
    return PAGE.format(title=html.escape(title), levels=levels, legend=legend, rows=rows, body="".join(body))


# ---------------------------------------------------------------------------------------------------------------------
# commands

def plain_streams():
    """An ASCII or piped terminal must not end a run: print what it cannot show as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def table(header, rows):
    """Print a table that can be pasted as Markdown."""
    cells = [header] + rows
    width = [max(len(r[k]) for r in cells) for k in range(len(header))]
    line = lambda r: "| " + " | ".join(c.ljust(w) for c, w in zip(r, width)) + " |"
    print("\n".join([line(header), "|" + "|".join("-" * (w + 2) for w in width) + "|"] + [line(r) for r in rows]))


def boundary_table(text, a):
    """Statistics of the boundaries a (n,) of text, as rows (name, value)."""
    byte = np.frombuffer(text, dtype=np.uint8)
    white = WHITESPACE.numpy()[byte]
    end = white & np.append(False, ~white[:-1])
    inside = np.append((byte[1:] >= 128) & (byte[1:] < 192), False)
    share = lambda hit, of: f"{hit.sum() / of.sum():.3f} ({hit.sum()} of {of.sum()})" if of.sum() else "none there"
    return [("bytes per chunk", f"{len(byte) / max(1, a.sum()):.2f} ({len(byte)} bytes, {a.sum()} boundaries)"),
            ("word-end bytes with a boundary", share(a & end, end)),
            ("all other bytes with a boundary", share(a & ~end, ~end)),
            ("boundaries inside a UTF-8 character", share(a & inside, a))]


def write_text(path, content):
    try:
        Path(path).write_text(content, encoding="utf-8")
        print(f"wrote {path}", file=sys.stderr)
    except OSError as e:
        fail(f"cannot write {path}: {e.strerror}")


def command_bpb(args, model, config, rank, world):
    data = args.data or config["data"]
    if not args.data or data in ("docs", "fineweb"):   # the held-out part
        corpus = load(data, args.data_dir, config.get("repo", REPO), 1, config.get("min_doc_bytes", 4096))[1]
    else:                                              # all of it, as one file after another
        data_ = [np.memmap(f, dtype=np.uint8, mode="r") for f in expand(data)]
        starts = np.cumsum([0] + [len(d) for d in data_[:-1]])
        corpus = Corpus(data_[0] if len(data_) == 1 else np.concatenate(data_), starts, data)
    if model.cfg.chunker == "bpe":
        corpus.mark_tokens()
    r = evaluate(model, corpus, config["row_bytes"], args.batch_size, 0, rank, world)
    if rank == 0:
        table(["text", "bytes", "bits per byte", "early exit", "greedy rate", "sampled rate"],
              [[data + ("" if args.data not in ("", "docs", "fineweb") else ", held out"), str(r["bytes"]), f"{r['bpb']:.4f}",
                f"{r['early_bpb']:.4f}", f"{r['greedy_rate']:.3f}", f"{r['sampled_rate']:.3f}"]])


def command_boundaries(args, model, config, rank, world):
    if args.file is not None:
        try:
            text = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
        except OSError as e:
            fail(f"cannot read {args.file}: {e.strerror}")
    else:
        text = args.text.encode("utf-8", "surrogateescape")
    if not text:
        fail("no text: give --text or --file something with at least one byte")
    p, a = boundaries(model, text, config["row_bytes"])
    p, a = p.tolist(), a.numpy()
    rows = boundary_table(text, a)
    if args.html:
        write_text(args.html, heat_map(text, p, a.tolist(), args.file or "text", rows))
    if args.json:
        found = dict(bytes=len(text), p=[round(q, 6) for q in p], boundary=a.astype(int).tolist())
        write_text(args.json, json.dumps(found))
    print(cut(text, a.tolist()))   # last: whoever reads along may leave early
    table(["boundaries", "share"], [list(r) for r in rows])


def command_sample(args, model, config, rank, world):
    if model.cfg.chunker == "bpe":
        fail("a bpe model cannot write: where GPT-2's tokens begin depends on bytes still to come; sample from another chunker")
    prompt = sys.stdin.buffer.read() if args.prompt == "-" else args.prompt.encode("utf-8", "surrogateescape")
    decoder = codecs.getincrementaldecoder("utf-8")("replace")   # holds a half character back until it is whole
    generator = torch.Generator().manual_seed(args.seed)
    text, stop, bar = b"", args.stop.encode("utf-8", "surrogateescape"), ""
    shown = cut(prompt, boundaries(model, prompt, config["row_bytes"])[1].tolist()) if args.show_boundaries and prompt else None
    print(shown or prompt.decode("utf-8", "replace"), end="", flush=True)
    for (byte, ended), in model.generate([prompt], args.bytes, config["row_bytes"], args.temperature, args.top_k, args.top_p,
                                         generator):
        if args.show_boundaries and ended and text:
            bar = "|"
        if bar and not decoder.getstate()[0]:   # not inside a character
            print(bar, end="")
            bar = ""
        print(decoder.decode(bytes([byte])), end="", flush=True)
        text += bytes([byte])
        if stop and text.endswith(stop):
            break
    print(decoder.decode(b"", final=True))


NOT_A_SETTING = {"seed", "name", "out_dir", "data_dir", "device", "resume", "log_every", "eval_every", "save_every"}


def read_run(folder):
    """A run's folder -> its config, train lines and eval lines; SystemExit(2) where these cannot be read."""
    try:
        config = json.loads(Path(folder, "config.json").read_text())
        lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
        lines = [{k: math.nan if v is None else v for k, v in line.items()} for line in lines]
        train = [r for r in lines if r["kind"] == "train"]
        evals = [r for r in lines if r["kind"] == "eval"]
        for r in evals:
            summary((config, train, [r]))
        return config, train, evals
    except Exception as e:   # no folder, no JSON, other fields
        fail(f"not a run of this version: {folder} ({type(e).__name__}: {e}); give folders that train.py has written")


def groups(runs):
    """Runs (config, train, eval) -> {label: runs}: equal settings but for the seed, named by their chunker and by the
    settings in which they leave what most of the runs have."""
    values = {k: [config.get(k) for config, *_ in runs] for k in runs[0][0] if k not in NOT_A_SETTING | {"chunker"}}
    usual = {k: max(v, key=v.count) for k, v in values.items()}
    out = {}
    for run in runs:
        label = " ".join([run[0]["chunker"]] + [f"{k}={run[0].get(k)}" for k in usual if run[0].get(k) != usual[k]])
        out.setdefault(label, []).append(run)
    return out


def summary(run):
    """The figures of one finished run, by column."""
    config, train, evals = run
    last, cfg = evals[-1], ModelConfig(**{f.name: run[0][f.name] for f in fields(ModelConfig)})
    with torch.device("meta"):
        model = ByteLM(cfg)
    used = last["sampled_rate" if model.chunker.by_chance else "greedy_rate"]   # what it was scored with
    middle = lambda values: float(np.nanmedian(values)) if np.isfinite(values).any() else math.nan
    return {"bits per byte": last["bpb"], "early exit": last["early_bpb"], "greedy rate": last["greedy_rate"],
            "sampled rate": last["sampled_rate"], "bytes a chunk": 1 / used if used else math.inf,
            "word-ends": last["word_end"], "elsewhere": last["other"],
            "std of A": middle([r["advantage_std"] for r in train[len(train) // 2:]]),   # second half of the run
            "gate SNR": middle([r["gate_snr"] for r in evals]), "kB/s": middle([r["kB_per_s"] for r in train]),
            "MFLOP a byte": flops_per_byte(cfg, config["row_bytes"], used) / 1e6,
            "parameters": sum(p.numel() for p in model.parameters()), "MB seen": last["seen"] / 1e6}


def command_compare(args):
    """A Markdown table, one line a setting: mean and, over several seeds, their standard deviation."""
    found = [(folder, read_run(folder)) for folder in args.runs]
    step = lambda evals: evals[-1]["step"] if evals else 0
    runs = [run for _, run in found if run[2] and step(run[2]) >= run[0]["max_steps"]]
    if not runs:
        fail("no finished run among those given; let one finish: python train.py --resume --name NAME")
    for folder, (config, _, evals) in found:
        if not evals or step(evals) < config["max_steps"]:
            print(f"left out: {folder} stands at step {step(evals)} of {config['max_steps']}", file=sys.stderr)
    digits = {"bits per byte": 4, "bytes a chunk": 2, "std of A": 2, "kB/s": 1, "MFLOP a byte": 2, "parameters": 0, "MB seen": 1}
    score = lambda group: np.mean([run[2][-1]["bpb"] for run in group[1]])
    lines, grouped = [], dict(sorted(groups(runs).items(), key=score))   # the best first
    for label, members in grouped.items():
        columns = [summary(run) for run in members]
        cells = []
        for name in columns[0]:
            x, d = np.array([c[name] for c in columns], dtype=float), digits.get(name, 3)
            spread = f" ± {x.std(ddof=1):.{d}f}" if len(x) > 1 and np.isfinite(x).all() and x.std() > 0.5 * 10 ** -d else ""
            cells.append("-" if np.isnan(x).all() else f"{x.mean():,.{d}f}{spread}")
        seeds = " ".join(str(seed) for seed in sorted(config["seed"] for config, *_ in members))
        note = " (guidance: looks ahead)" if members[0][0]["chunker"] == "bpe" else ""
        lines.append([label + note, seeds, *cells])
    table(["setting", "seeds", *summary(runs[0])], lines)
    if args.plot:
        plot(args.plot, grouped)


def plot(path, grouped):
    """Bits per byte against bytes seen, a line a setting (the mean over seeds) in a band (from the least to the most)."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        fail("--plot needs matplotlib, which is not installed; install it, or leave --plot out")
    fig, ax = plt.subplots(figsize=(9, 5.5), layout="constrained")
    last = []
    for k, (label, members) in enumerate(grouped.items()):
        steps = sorted(set.intersection(*({r["step"] for r in evals if r["seen"]} for _, _, evals in members)))
        if not steps:
            continue
        at = [{r["step"]: r for r in evals} for _, _, evals in members]
        seen = [at[0][s]["seen"] / 1e6 for s in steps]
        y = np.array([[run[s]["bpb"] for s in steps] for run in at])                   # (seeds, evaluations)
        line, = ax.plot(seen, y.mean(0), label=label, marker="o", ms=3, lw=1.6, ls=["-", "--", ":"][k // 10 % 3])
        ax.fill_between(seen, y.min(0), y.max(0), color=line.get_color(), alpha=0.15, lw=0)
        last += y[:, -1].tolist()
    if np.isfinite(last).any():
        ax.set_ylim(np.nanmin(last) - 0.05, np.nanmin(last) + 0.5)   # the first steps are far above: left out
    ax.set(xlabel="text seen in training, MB", ylabel="bits per byte, held-out text")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    try:
        fig.savefig(path, dpi=130)
    except (OSError, ValueError) as e:
        fail(f"cannot write {path}: {e}; give --plot a name that ends in .png or .svg")
    print(f"wrote {path}", file=sys.stderr)


def main(argv=None):
    plain_streams()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = lambda message: fail(f"{message}; see python eval.py --help")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name, run, text):
        c = commands.add_parser(name, help=text, allow_abbrev=False)
        c.error = parser.error
        c.set_defaults(run=run)
        c.add_argument("ckpt", help="a run's folder or its ckpt.pt")
        c.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
        return c

    for name in ("bpb", *TASKS, "all"):
        text = {"bpb": "bits per byte of a text", "all": "every benchmark, and bpb"}.get(name, "a benchmark")
        c = command(name, command_bpb if name == "bpb" else command_tasks, text)
        c.add_argument("--batch_size", type=int, default=32, help="rows at a time; changes the speed alone")
        if name in ("bpb", "all"):
            c.add_argument("--data", default="", help="a file, folder or glob, whole; or docs or fineweb, the held-out part; "
                                                      "default: what is held out of the run's own text")
            c.add_argument("--data_dir", default="data", help="where train.py keeps prepared corpora and shards")
        if name != "bpb":
            c.add_argument("--bench_dir", default="data/bench", help="the benchmarks' files; what is missing is fetched into it")
            c.add_argument("--limit", type=int, default=0, help="the first so many questions; 0 = all")
            c.add_argument("--json", help="write the figures here")
            c.add_argument("--dump", help="write one JSON line a question here")
    c = command("boundaries", command_boundaries, "where the model cuts a text")
    c.add_argument("--text", default="The quick brown fox jumps over the lazy dog, and nobody told it what a word is.")
    c.add_argument("--file", help="read the text from here; - is the standard input")
    c.add_argument("--html", help="write a heat map of the probabilities here")
    c.add_argument("--json", help="write the probabilities and boundaries here")
    c = command("sample", command_sample, "let the model write")
    c.add_argument("--prompt", default="The ", help="- is the standard input")
    c.add_argument("--stop", default="", help="end after this text")
    c.add_argument("--show_boundaries", action="store_true", help="write | where the model ends a chunk")
    c.add_argument("--bytes", type=int, default=300)
    c.add_argument("--temperature", type=float, default=0.8, help="0 = always the likeliest byte")
    c.add_argument("--top_k", type=int, default=0, help="draw from the k likeliest bytes only; 0 = all")
    c.add_argument("--top_p", type=float, default=1.0, help="draw from the fewest bytes that hold this share")
    c.add_argument("--seed", type=int, default=0)
    c = commands.add_parser("compare", help="finished runs side by side", allow_abbrev=False)
    c.error = parser.error
    c.add_argument("runs", nargs="+", metavar="RUN", help="folders that train.py has written")
    c.add_argument("--plot", help="also draw bits per byte against bytes seen, into this .png or .svg")
    args = parser.parse_args(argv)
    if args.command == "compare":
        return command_compare(args)
    for name, low, high in (("batch_size", 1, math.inf), ("limit", 0, math.inf), ("bytes", 0, math.inf), ("temperature", 0, math.inf),
                            ("top_k", 0, math.inf), ("top_p", 1e-9, 1), ("seed", 0, 2 ** 31)):
        value = getattr(args, name, low)
        if not low <= value <= high:
            fail(f"--{name} {value} is out of range; give {low:g} to {high:g}")
    rank, world, device = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1)), find_device(args.device)
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("gloo")
    model, config = load_model(args.ckpt, device)
    try:
        args.run(args, model, config, rank, world)
        if world > 1:
            dist.destroy_process_group()
    except BrokenPipeError:   # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as e:
        fail(f"cannot read or write {e.filename or 'the output'}: {e.strerror}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130)

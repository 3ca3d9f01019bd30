"""
Train a byte-level language model that learns its own tokens.

    python train.py                                    a laptop: the tiny preset on documentation you already have
    python train.py --data my_text.txt --max_steps 500     your own file, folder or glob
    python train.py --resume                           go on where the newest run stopped
    python train.py --bench --preset 20m               time a step instead, and see where its time goes
    torchrun --nproc_per_node=8 train.py               eight GPUs: the 147m preset on FineWeb

Every setting is a field of TrainConfig (or of ModelConfig, in model.py) and a flag of the same name. What a run writes
is in out/<run>: ckpt.pt and the one before it, previous.pt; config.json; and log.jsonl, one JSON object a line.
"""
import argparse
import contextlib
import ctypes
import difflib
import glob
import inspect
import itertools
import json
import math
import os
import re
import shutil
import signal
import statistics
import sys
import threading
import time
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

import model as model_file
from data import REPO, SHARDS, Loader, fail, in_background, load
from eval import boundaries, cut, evaluate, find_device, load_weights, plain_streams, read_checkpoint, table
from model import CHUNKERS, SEPARATOR, ByteLM, ModelConfig, all_sum, flops_per_byte, param_groups, world_size


# ---------------------------------------------------------------------------------------------------------------------
# settings and the command line

@dataclass
class TrainConfig(ModelConfig):
    """The run's settings, on top of the model's. The comment behind each is its help text."""
    preset: str = "auto"          # tiny, 20m, 40m, 90m or 147m; auto = 147m with CUDA, else tiny
    data: str = "auto"            # docs, fineweb, or a file, folder or glob; auto = fineweb with CUDA, else docs
    data_dir: str = "data"        # where prepared corpora and shards are kept
    repo: str = REPO              # for fineweb: the dataset on the hub
    shards: int = SHARDS          # for fineweb: training shards an epoch goes through, fetched as they are needed
    min_doc_bytes: int = 4096     # for fineweb: shorter documents are left out, longer ones cut to it; 0 = all, packed
    out_dir: str = "out"          # where runs are kept
    name: str = ""                # this run's folder in out_dir; empty = named after preset and data
    resume: bool = False          # go on with the run `name`, or the newest; its settings are kept unless given again
    init_from: str = ""           # take weights (and the model's shape) from this checkpoint, then train on `data`
    seed: int = 1                 # of weights, row order and boundary noise
    device: str = "auto"          # cpu, cuda or mps; auto = cuda where there is one, else cpu
    dtype: str = "auto"           # bf16 or fp32 matmuls; auto = bf16 where the hardware has it. Losses are always fp32
    compile: str = "auto"         # on, off; auto = on for CUDA where a compiler works
    row_bytes: int = 4096         # T, bytes a row
    batch_rows: int = 128         # B, rows a step, over all ranks and micro-steps, twins included
    accum_steps: int = 1          # micro-steps a step; batch-relative means are then over a micro-step
    pairs: int = 0                # of these rows, how many pairs are twins, which alone train the policy
    pair_steps: int = 1000000000  # steps after which there are no more twins
    max_steps: int = 11444        # 0 = only evaluate and save
    warmup_steps: int = 858       # steps of linear warm-up from a tenth of the peak; at most half the run
    schedule: str = "cosine"      # cosine = down to 0 from the peak on; wsd = stay, then down to 0 over the last 40 %
    lr: float = 1.5e-3            # peak learning rate of AdamW
    gate_lr: float = 6e-3         # the same for rl's policy
    weight_decay: float = 0.1     # of matrices, a chunker's excepted
    beta1: float = 0.9            # AdamW's averages of the gradient
    beta2: float = 0.95           # and of its square
    grad_clip: float = 1.0        # largest gradient norm; 0 = no limit
    log_every: int = 10           # steps between log lines
    eval_every: int = 500         # steps between evaluations
    eval_bytes: int = 1000000     # held-out bytes an evaluation reads at most
    save_every: int = 500         # steps between checkpoints
    bench: str = "no"             # --bench times steps on made-up text and ends; --bench NAME in turns with that chunker


# 20m to 147m: paper, appendix: sizes, learning rates and warm-up; steps = its bytes / (rows * T)
PRESETS = {
    "tiny": dict(n_embd=96, n_head=3, n_enc=1, n_main=3, n_dec=1, window=32, row_bytes=256, batch_rows=32,
                 max_steps=800, warmup_steps=100, lr=8e-3, gate_lr=1.6e-2,
                 log_every=20, eval_every=200, eval_bytes=200000, save_every=200),
    "20m": dict(n_embd=384, n_head=6, n_enc=2, n_main=6, n_dec=2, batch_rows=32,
                max_steps=6332, warmup_steps=473, lr=3e-3),
    "40m": dict(n_embd=512, n_head=8, n_enc=4, n_main=6, n_dec=4, batch_rows=64,
                max_steps=5722, warmup_steps=420, lr=2.4e-3),
    "90m": dict(n_embd=768, n_head=12, n_enc=4, n_main=6, n_dec=4, batch_rows=128,
                max_steps=6485, warmup_steps=477, lr=2e-3),
    "147m": dict(),   # the defaults above
}
CHOICES = dict(preset=["auto", *PRESETS], chunker=CHUNKERS, bench=["no", "alone", *CHUNKERS], dtype=["auto", "bf16", "fp32"],
               compile=["auto", "on", "off"], schedule=["cosine", "wsd"])
LEAST = dict(shards=1, n_embd=2, n_head=1, window=1, policy_window=1, row_bytes=2, batch_rows=1, accum_steps=1,
             log_every=1, eval_every=1, save_every=1, eval_bytes=1)   # all other numbers start at 0
MOST = dict(policy_window=12, gamma=1, lambda_early=1, beta1=0.9999, beta2=0.9999, seed=2 ** 31, n_embd=65536, n_enc=1000,
            n_main=1000, n_dec=1000, window=65536, row_bytes=2 ** 24, batch_rows=2 ** 20)


def parse_flags(argv):
    """Command line -> dict of the settings that were given. Unknown names end with the nearest known one."""
    source = inspect.getsource(ModelConfig) + inspect.getsource(TrainConfig)
    comment = dict(re.findall(r"^    (\w+): \w+ = .*?  # (.+)$", source, re.M))

    def true_or_false(text):
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False, argument_default=argparse.SUPPRESS)
    parser.error = lambda message: fail(f"{message.replace('argument ', '')}; see python train.py --help")
    for f in fields(TrainConfig):
        kind = dict(type=true_or_false, nargs="?", const=True) if f.type is bool else dict(type=f.type)
        if f.name == "bench":
            kind |= dict(nargs="?", const="alone")
        text = f"{comment[f.name]} (default {f.default})".replace("%", "%%")
        parser.add_argument(f"--{f.name}", help=text, metavar=f.name.upper(), **kind)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-")
        near = difflib.get_close_matches(name, [f.name for f in fields(TrainConfig)], 1, 0.5)
        hint = f"did you mean --{near[0]}?" if near else "see python train.py --help"
        hint = hint if unknown[0].startswith("-") else "settings start with --, and a glob goes into quotes"
        fail(f"unknown setting {unknown[0]}; {hint}")
    return vars(given)


def settings(argv):
    """Command line -> TrainConfig, and the checkpoint it resumes or starts from (or None).

    Later ones win: defaults, preset, the checkpoint's settings (--resume: all; --init_from: the model's), flags."""
    given = parse_flags(argv)
    ckpt = None
    if given.get("resume"):
        if given.get("init_from"):
            fail("--resume goes on with a run, --init_from starts one from its weights; give one of them")
        out_dir, name = given.get("out_dir", "out"), given.get("name")
        folder = os.path.join(glob.escape(out_dir), glob.escape(name) if name else "*", "ckpt.pt")
        found = sorted(glob.glob(folder), key=os.path.getmtime)
        if not found:
            before = glob.glob(os.path.join(os.path.dirname(folder), "previous.pt"))
            fail(f"nothing to resume: no {os.path.join(out_dir, name or '*', 'ckpt.pt')}; "
                 + (f"rename {before[0]} to ckpt.pt" if before else "start a run without --resume"))
        ckpt = read_checkpoint(found[-1])
        kind = {f.name: f.type for f in fields(TrainConfig)}
        base = {k: v for k, v in ckpt["config"].items() if k in kind}
        wrong = [k for k, v in base.items() if type(v) is not kind[k]]
        if wrong:
            fail(f"{found[-1]} has settings of the wrong kind: {wrong[0]}; start a run without --resume")
        base["name"] = os.path.basename(os.path.dirname(found[-1]))
    else:
        preset = given.get("preset", "auto")
        if preset == "auto":
            preset = "147m" if torch.cuda.is_available() and given.get("device", "auto") in ("auto", "cuda") else "tiny"
        if preset not in PRESETS:
            fail(f"unknown preset {preset}; there are {', '.join(PRESETS)}")
        base = dict(PRESETS[preset])
        if given.get("init_from"):
            ckpt = read_checkpoint(given["init_from"])
            shape = {f.name for f in fields(ModelConfig)}
            base |= {k: v for k, v in ckpt["config"].items() if k in shape or k == "row_bytes"}
        given["preset"] = preset
    cfg = TrainConfig(**(base | given))
    cfg.device = find_device(cfg.device).type
    if cfg.data == "auto":
        cfg.data = "fineweb" if cfg.device == "cuda" else "docs"
    if cfg.dtype == "auto":
        fast = torch.cuda.is_bf16_supported(including_emulation=False) if cfg.device == "cuda" else (
            cfg.device == "cpu" and getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
        cfg.dtype = "bf16" if fast else "fp32"
    return cfg, ckpt


def check(cfg, world):
    """End with a line where settings cannot work together."""
    for name, options in CHOICES.items():
        if getattr(cfg, name) not in options:
            fail(f"--{name} {getattr(cfg, name)}: choose one of {', '.join(options)}")
    for f in fields(cfg):
        value, low, high = getattr(cfg, f.name), LEAST.get(f.name, 0), MOST.get(f.name, 1e15)
        if not isinstance(value, (str, bool)) and not low <= value <= high:
            fail(f"--{f.name} {value} is out of range; give {low} to {high:g}")
    if not re.fullmatch(r"[\w+-][\w.+-]*|", cfg.name):
        fail(f"--name {cfg.name}: a run's name is one folder's, of letters, digits and _ . + -")
    if not 0 < cfg.rate < 1:
        fail(f"--rate {cfg.rate:g}: a target share of bytes with a boundary lies between 0 and 1; 0.2 is one in five")
    if cfg.n_embd % (2 * cfg.n_head):
        fail(f"--n_embd {cfg.n_embd} --n_head {cfg.n_head}: heads need an even width each; "
             f"n_embd must be a multiple of {2 * cfg.n_head}")
    parts = world * cfg.accum_steps
    for name in ("batch_rows", "pairs"):
        value = getattr(cfg, name)
        if value % parts:
            low = value - value % parts
            near = f"{low} or {low + parts}" if low or name == "pairs" else f"{parts}"
            fail(f"--{name} {value} does not divide into {world} ranks x {cfg.accum_steps} micro-steps; "
                 f"the nearest that do: {near}")
    if cfg.pairs and cfg.chunker != "rl":
        fail(f"--pairs {cfg.pairs} --chunker {cfg.chunker}: twins are for rl, whose draws they judge; leave --pairs out")
    if 2 * cfg.pairs > cfg.batch_rows:
        fail(f"--pairs {cfg.pairs} takes {2 * cfg.pairs} rows, but there are --batch_rows {cfg.batch_rows}; "
             f"at most {cfg.batch_rows // 2} pairs")
    if cfg.chunker == "rl" and cfg.batch_relative and not cfg.pairs and cfg.batch_rows // cfg.accum_steps == 1:
        fail("one row has no batch to be relative to: use more --batch_rows, or fewer --accum_steps, "
             "or --batch_relative false")


# ---------------------------------------------------------------------------------------------------------------------
# parts of the loop

def learning_rate(cfg, step):
    """Share of the peak at a step: a line up from 0.1, then the schedule."""
    warmup = min(cfg.warmup_steps, cfg.max_steps // 2)
    if step < warmup:
        return 0.1 + 0.9 * step / warmup
    if cfg.schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, cfg.max_steps - warmup))
    return min(1.0, (cfg.max_steps - step) / (0.4 * cfg.max_steps))


def keep_freed_memory():
    """Tell glibc to keep freed memory: by default it hands it back every step, and every page comes back by a fault."""
    try:
        libc = ctypes.CDLL(None)
        if libc.mallopt(-3, 2 ** 30) or libc.mallopt(-3, 2 ** 25):   # M_MMAP_THRESHOLD; older ones allow less
            libc.mallopt(-1, 2 ** 31 - 1)                           # M_TRIM_THRESHOLD
    except (AttributeError, OSError, TypeError):
        pass   # another C library: nothing to tell


def compile_parts(cfg, model, device, say=print):
    """Where cfg wants it, compile in place and part by part, so that the names in a checkpoint stay as they are. Before that a
    trifle: compilers fail in many ways (none installed, no triton, no headers), and all mean: run eagerly."""
    if cfg.compile == "off" or cfg.compile == "auto" and device.type != "cuda":
        return
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
    except Exception as e:
        say(f"no working compiler ({type(e).__name__}): running eagerly")
        return
    model.encoder.compile()
    model.decoder.compile()
    model.main.compile(dynamic=True)   # one graph for any number of chunks, which changes from step to step


def save(path, **content):
    """Write a checkpoint beside its place, flush it to the disk, then rename; what was there becomes previous.pt. A kill at
    any moment leaves a whole one under either name."""
    tmp, before = f"{path}.tmp", os.path.join(os.path.dirname(path), "previous.pt")
    try:
        with open(tmp, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
        if os.path.exists(path):
            with contextlib.suppress(FileNotFoundError):
                os.remove(before + ".tmp")
            try:
                os.link(path, before + ".tmp")
            except OSError:   # no links on this file system
                shutil.copyfile(path, before + ".tmp")
            os.replace(before + ".tmp", before)
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:   # torch turns a full disk into a RuntimeError
        for name in (tmp, before + ".tmp"):
            with contextlib.suppress(OSError):
                os.remove(name)
        kept = "the last good checkpoint is kept; " if os.path.exists(path) else ""
        fail(f"cannot save {path} ({str(e).splitlines()[0]}); {kept}is the disk full? free some space, then --resume")


def open_log(path, step):
    """Open log.jsonl for appending, without what came after `step` and without lines that are not whole."""
    def good(line):
        try:
            return line.endswith("\n") and json.loads(line)["step"] <= step
        except (ValueError, TypeError, KeyError):
            return False

    keep = []
    if step >= 0 and os.path.exists(path):
        with open(path, errors="replace") as f:
            keep = [line for line in f if good(line)]
    with open(path + ".tmp", "w") as f:
        f.writelines(keep)
    os.replace(path + ".tmp", path)
    return open(path, "a", buffering=1)


def load_optimizer(optimizer, state, name):
    """Copy the optimiser's averages, which must be of the same parameters; its settings are those of this run."""
    mine = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        optimizer.load_state_dict(state)
        for group, settings_ in zip(optimizer.param_groups, mine):
            group.update(settings_)
        for p, s in optimizer.state.items():
            if s["exp_avg"].shape != p.shape or s["exp_avg_sq"].shape != p.shape:
                raise ValueError("another shape")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        fail(f"{name} holds the optimiser of another model ({e}); --init_from takes its weights alone")


def run_folder(cfg):
    """This run's folder: the one asked for, or a fresh one named after preset and data, which becomes cfg.name."""
    if cfg.name:
        path = os.path.join(cfg.out_dir, cfg.name)
        if any(os.path.exists(os.path.join(path, f)) for f in ("ckpt.pt", "previous.pt")) and not cfg.resume:
            fail(f"{path} holds a run already; --resume goes on with it, another --name starts beside it")
        return path
    base = f"{cfg.preset}-{re.sub(r'[^A-Za-z0-9_-]+', '-', os.path.basename(os.path.normpath(cfg.data))).strip('-')}"
    names = itertools.chain([base], (f"{base}-{k}" for k in itertools.count(2)))
    cfg.name = next(n for n in names if not os.path.exists(os.path.join(cfg.out_dir, n)))
    return os.path.join(cfg.out_dir, cfg.name)


def clock(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}h{seconds // 60 % 60:02d}m" if seconds >= 3600 else f"{seconds // 60}m{seconds % 60:02d}s"


PEAK_TFLOPS = {"B200": 2250, "H200": 989, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71}   # bf16, dense


def peak_flops(device, dtype, world):
    """FLOP/s that all GPUs have together, or None where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and dtype == "bf16" else ""
    return next((v * 1e12 * world for k, v in PEAK_TFLOPS.items() if k in name), None)


def train_step(cfg, model, trained, optimizer, batches, noise, twins=0):
    """One step on a rank's micro-batches (x, y, token_start) and their noise (micro-steps, rows, T).

    Returns, on the device, so that nobody waits: the stats, means over micro-steps; then the loss and each part's gradient
    norm (8,); and whether any of these is no finite number. Then weights and optimiser stay as they were, on all ranks.
    """
    stats, loss = {}, 0
    for k, ((x, y, token_start), u) in enumerate(zip(batches, noise)):
        if trained is not model:   # before forward, or it has no effect
            trained.require_backward_grad_sync = k == len(batches) - 1
        with torch.autocast(u.device.type, torch.bfloat16, enabled=cfg.dtype == "bf16"):
            result = trained(x, y, u, twins, token_start)
        (result["loss"] / len(batches)).backward()
        stats = {name: stats.get(name, 0) + value / len(batches) for name, value in result["stats"].items()}
        loss = loss + result["loss"].detach() / len(batches)
    parts = [list(part.parameters()) for part in model.children()]
    norms = [get_total_norm([p.grad for p in part]) if part else torch.zeros_like(loss) for part in parts]
    health = torch.stack([all_sum(loss) / world_size(), *norms])
    bad = ~health.sum().isfinite()
    clip_grads_with_norm_(model.parameters(), cfg.grad_clip or math.inf, health[1:].norm())
    host_decides = bad.device.type == "mps"   # elsewhere AdamW has a switch on the device, made for GradScaler: 1 = skip
    optimizer.found_inf = None if host_decides else bad.float()
    if not host_decides or not bad:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return stats, health, bad


def illness(model, step, loss, norms):
    """What was not finite in a step, in words."""
    names = [name for (name, _), norm in zip(model.named_children(), norms) if not math.isfinite(norm)]
    where = f"no finite gradient in {', '.join(names)}" if names else "finite gradients"
    return f"step {step}: loss {loss:.3g}, {where}"


def watch_ranks(rank, world, patience=30):
    """A thread that ends this process where another rank has not been heard of for `patience` seconds: collectives alone would
    wait for it far longer. Returns an Event that ends the watch. Ranks meet at torchrun's store, and time is counted in own
    beats, so that a machine that slept raises no alarm."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    names, over = [f"alive/{r}" for r in range(world)], threading.Event()
    store.set(names[rank], "0")
    dist.barrier()   # all names are there

    def watch():
        heard, beat = {}, 0   # rank -> its last word and at which beat it came
        while not over.wait(1):
            beat += 1
            try:
                store.set(names[rank], str(beat))
                for r, word in enumerate(store.multi_get(names)):
                    if heard.get(r, [None])[0] != word:
                        heard[r] = word, beat
                lost = [f"rank {r}" for r, (_, when) in heard.items() if beat - when > patience]
            except RuntimeError:
                lost = ["the ranks' meeting point"]
            if lost and not over.is_set():
                print(f"error: {lost[0]} is gone, rank {rank} leaves too; start again with --resume", file=sys.stderr, flush=True)
                os._exit(2)

    threading.Thread(target=watch, daemon=True).start()
    return over


def gate_snr(model, batches, twins, seed, rank, world):
    """Signal to noise of the chunker's gradient: norm of its mean over norm of its deviation, across each rank's batches
    (x, y, token_start). The mean's own noise is taken off: 0 means that no signal shows; nan without batches."""
    if not batches:
        return math.nan
    parameters = list(model.chunker.parameters())
    device, grads = parameters[0].device, []
    generator = torch.Generator(device).manual_seed(seed)
    for x, y, _ in batches:
        u = torch.rand(world, len(x) + twins, x.size(1), generator=generator, device=device)[rank]
        loss = model(x.to(device), y.to(device), u, twins)["loss"]
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    grads, n = torch.stack(grads), len(batches) * world         # (batches, parameters)
    mean = all_sum(grads.sum(0)) / n
    variance = float(all_sum(((grads - mean) ** 2).sum())) / (n - 1)
    return math.sqrt(max(0.0, float((mean ** 2).sum()) - variance / n) / variance) if variance else math.nan


def look(model, text, cfg, rank, world):
    """Evaluate on held-out text -> numbers, and lines to print: a summary and two places of the text, cut."""
    model.eval()
    with torch.compiler.set_stance("force_eager"):   # other shapes than in training: graphs of their own would not pay
        e = evaluate(model, text, cfg.row_bytes, max(1, 8192 // cfg.row_bytes), -(-cfg.eval_bytes // cfg.row_bytes),
                     rank, world)
        lines = [f"{e['bpb']:.4f} bits per byte, early exit {e['early_bpb']:.4f} | "
                 f"boundaries: greedy {e['greedy_rate']:.3f}, sampled {e['sampled_rate']:.3f}, "
                 f"at word-ends {e['word_end']:.3f}, elsewhere {e['other']:.3f}"]
        for at in (0, len(text.data) // 2):
            piece = bytes(text.data[at:at + 110])
            lines.append("    " + cut(piece, boundaries(model, piece, cfg.row_bytes)[1].tolist(), one_line=True))
    model.train()
    return e, lines


# chunkers that learn, and what moves their rate
SETTINGS_OF_RATE = dict(rl="raise --lambda_target, or lower --gate_lr", hnet="raise --lambda_ratio", pooling="raise --lambda_prior")


def collapsed(e):
    """Whether an evaluation's boundaries are (almost) nowhere or everywhere."""
    return not 0.01 <= e["sampled_rate"] <= 0.95 or e["greedy_rate"] in (0.0, 1.0)


# ---------------------------------------------------------------------------------------------------------------------
# --bench: how fast is a step, and where does its time go?

BENCH_SECONDS = 30


class HostReads(torch.overrides.TorchFunctionMode):
    """Counts calls that make the host wait for a value of the device."""
    n = 0

    def __torch_function__(self, call, types, args=(), kwargs=None):
        waits = {"item", "tolist", "__bool__", "__int__", "__float__", "__index__", "cpu", "numpy", "nonzero"}
        self.n += getattr(call, "__name__", "") in waits
        return call(*args, **(kwargs or {}))


def matmul_rate(device, dtype):
    """FLOP/s of square matrix products here, the median of 50."""
    n = 2048 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device, dtype=dtype)
    return 2 * n ** 3 / statistics.median(seconds_of(device, lambda: a @ a) for _ in range(50))


def seconds_of(device, call):
    """How long call() takes, with the device's work in it."""
    sync = (lambda: None) if device.type == "cpu" else torch.accelerator.synchronize
    sync()
    begin = time.perf_counter()
    call()
    sync()
    return time.perf_counter() - begin


def seconds_by_part(device, model, optimizer, call):
    """Run call(), a step, with a clock around each of its parts -> {part: seconds}; a part within another counts once."""
    seconds, inner = {}, [0.0]

    def timed(part, f):
        def run(*args, **kwargs):
            out = []
            inner.append(0.0)
            took = seconds_of(device, lambda: out.append(f(*args, **kwargs)))
            seconds[part] = seconds.get(part, 0.0) + took - inner.pop()
            inner[-1] += took
            return out[0]
        return run

    policy, heads = "policy, sampling, rewards", "heads and losses"
    with contextlib.ExitStack() as stack:
        part_of = dict(encoder="encoder", main="main", decoder="decoder", early_head=heads, late_head=heads)
        stack.enter_context(patch.dict(model.__dict__, {name: timed(part, getattr(model, name)) for name, part in part_of.items()}))
        for owner, name, part in ((model.chunker, "features", policy), (model.chunker, "sample", policy), (model.chunker, "soft", policy),
                                  (model.chunker, "loss", policy), (model_file, "chunk_index", policy), (model, "losses", heads),
                                  (torch.autograd, "backward", "backward"), (optimizer, "step", "optimiser")):
            stack.enter_context(patch.object(owner, name, timed(part, getattr(owner, name))))
        timed("all else", call)()
    return seconds


def peak_memory(device):
    """Bytes, of the GPU's memory or of the process; nan where that is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    try:
        import resource
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    except ImportError:   # Windows
        return math.nan


def main_padding(cfg, a):
    """Share of the main transformer's FLOPs that go into spare chunks and slots, for actions a (B,T)."""
    chunks, counts, C = model_file.chunk_index(a), a.sum(1).double(), cfg.n_embd
    useful = 96 * C * C * counts.sum() + 6 * C * (counts ** 2).sum()                          # of a layer, as in flops_per_byte
    return float(1 - useful / (96 * C * C * len(chunks.end) + 6 * C * chunks.slots.numel() * chunks.slots.size(1)))


def bench(cfg, device):
    """Time steps on made-up words with untrained weights, of cfg's chunker and perhaps of another in turns; print tables."""
    micro, T = cfg.accum_steps, cfg.row_bytes
    b, twins = cfg.batch_rows // micro, cfg.pairs // micro
    graphs = torch._dynamo.utils.counters["stats"]
    sides = [cfg]
    if cfg.bench != "alone":   # byte: a plain GPT over bytes, all of whose layers see the whole row
        window = T if cfg.bench == "byte" else cfg.window
        sides.append(replace(cfg, chunker=cfg.bench, window=window, pairs=cfg.pairs if cfg.bench == "rl" else 0))

    def progress(text):
        if sys.stderr.isatty():
            print(f"\r{text}{' ' * 20}", end="", file=sys.stderr, flush=True)

    def made(k, n):
        """Micro-batches of words, n of whose rows are to run twice, and their noise."""
        g = torch.Generator(device).manual_seed(k)
        random = lambda rows: torch.rand(micro, rows, T, generator=g, device=device)
        y = torch.where(random(b - n) < 0.18, 32, 97 + (26 * random(b - n)).long())           # letters and blanks
        x = torch.nn.functional.pad(y[..., :-1], (1, 0), value=SEPARATOR)
        return list(zip(x, y, x == 32)), random(b)

    def prepared(side):
        torch.manual_seed(side.seed)
        model = ByteLM(side).to(device)
        optimizer = torch.optim.AdamW(param_groups(model, 0.0, 0.0, 0.0), lr=0.0, fused=True)   # weights stay
        compile_parts(side, model, device)
        before, n = graphs["unique_graphs"], side.pairs // micro
        step = lambda k: train_step(side, model, model, optimizer, *made(k, n), n)
        for k in range(5):
            progress(f"warm-up of {side.chunker}: step {k + 1} of 5")
            step(k)
        return side, model, optimizer, step, graphs["unique_graphs"] - before, []

    sides = [prepared(side) for side in sides]
    warm, begin, k = graphs["unique_graphs"], time.monotonic(), 5
    while k < 15 or time.monotonic() - begin < BENCH_SECONDS and k < 205:   # ten rounds at least
        for _, _, _, step, _, times in sides if k % 2 else sides[::-1]:
            times.append(seconds_of(device, lambda: step(k)))
        k += 1
        progress(f"round {k - 5}, {time.monotonic() - begin:.0f} s")
    progress("\r")
    memory, more = peak_memory(device) / 1e9, graphs["unique_graphs"] - warm

    peak, against = peak_flops(device, cfg.dtype, 1), "what its maker says of this GPU"
    if not peak:
        peak = matmul_rate(device, torch.bfloat16 if cfg.dtype == "bf16" else torch.float32)
        against = f"this machine's own {cfg.dtype} matrix products"
    rows = []
    for side, model, _, step, compiled, times in sides:
        with HostReads() as reads, torch.compiler.set_stance("force_eager"):
            step(k)
        batches, u = made(k, 0)
        x, _, starts = batches[0]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            a = model(x, u=u[0], token_start=starts)["a"].cpu()
        text = micro * (b - side.pairs // micro) * T                                          # twins count once
        median = statistics.median(times)
        ratio = statistics.median(first / t for first, t in zip(sides[0][-1], times)) * text / (micro * (b - twins) * T)
        rate = float(a.double().mean())
        mfu = micro * b * T / median * flops_per_byte(side, T, rate) / peak
        rows.append([side.chunker, f"{text / median / 1e3:.1f}", f"{ratio:.3f}",
                     f"{1e3 * median:.0f} ({1e3 * min(times):.0f} to {1e3 * max(times):.0f})", f"{rate:.3f}",
                     f"{main_padding(side, a):.1%}", f"{mfu:.1%}", str(reads.n), str(compiled),
                     f"{sum(p.numel() for p in model.parameters()):,}"])
    print(f"preset {cfg.preset}, {device.type}, {torch.get_num_threads()} threads, {cfg.dtype}, torch {torch.__version__}, "
          f"{cfg.batch_rows} rows of {T} bytes, {len(times)} rounds\n")
    table(["chunker", "kB/s", "against the first", "ms a step", "rate", "padding in main", "MFU", "host reads", "graphs", "parameters"], rows)
    print(f"\nMedians. MFU against {against}, {peak / 1e12:.2f} TFLOP/s. Graphs compiled after warm-up: {more}. Peak memory: {memory:.2f} GB.")

    _, model, optimizer, step, _, _ = sides[0]
    saved = {}   # storages that the backward pass needs

    def note(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), torch.compiler.set_stance("force_eager"):
        step(k)
    weights = sum(saved.get(p.untyped_storage().data_ptr(), 0) for p in model.parameters())
    print(f"Run eagerly, the backward pass needs {(sum(saved.values()) - weights) / b / 1e6:.1f} MB a row.\n")
    parts = [seconds_by_part(device, model, optimizer, lambda: step(k + i)) for i in range(5)]
    middle = {part: statistics.median(p[part] for p in parts) for part in parts[0]}
    total = sum(middle.values())
    table(["part", "ms", "share"], [[part, f"{1e3 * t:.1f}", f"{t / total:.1%}"] for part, t in middle.items()])


# ---------------------------------------------------------------------------------------------------------------------
# the whole

def main(argv=None):
    # -- set-up
    plain_streams()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cfg, ckpt = settings(argv)
    check(cfg, world)

    def say(text):
        if rank == 0:
            try:
                print(text, flush=True)
            except OSError:   # whoever read along has left, or its disk is full; the run goes on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    keep_freed_memory()
    device = torch.device(cfg.device)
    if cfg.bench != "no":
        if world > 1:
            fail("--bench times one process; run it without torchrun")
        return bench(cfg, device)
    if cfg.resume and ckpt["step"] >= cfg.max_steps:
        return say(f"{cfg.name} stands at step {ckpt['step']}: nothing left to do; --max_steps {2 * ckpt['step']} would double it")
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank % torch.cuda.device_count())))
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"   # evaluation sums on the CPU
        dist.init_process_group(backend, timeout=timedelta(hours=2))          # a download may take long; the dead are noticed below
        watch = watch_ranks(rank, world)
    wait = dist.barrier if world > 1 else lambda: None
    if rank == 0:
        out = run_folder(cfg)
        say(f"{'' if torch.cuda.is_available() else 'no CUDA device: '}preset {cfg.preset} on {cfg.data}, "
            f"{world} x {device.type}, {torch.get_num_threads()} threads, {cfg.dtype}, torch {torch.__version__} -> {out}")

    # -- data: rank 0 prepares it, the others find it done
    if rank:
        wait()
    train_text, val_text = load(cfg.data, cfg.data_dir, cfg.repo, cfg.shards, cfg.min_doc_bytes)
    if rank == 0:
        wait()
    if cfg.chunker == "bpe":
        train_text.mark_tokens(), val_text.mark_tokens()
    loader = Loader(train_text, cfg.row_bytes, cfg.seed, ckpt["place"] if cfg.resume else (0, 0, 0))
    say(f"text: {train_text} to train on, {val_text} held out")

    # -- model, optimiser
    torch.manual_seed(cfg.seed)
    model = ByteLM(cfg)
    if ckpt:
        load_weights(model, ckpt["model"], cfg.init_from or cfg.name)
    model.to(device)
    optimizer = torch.optim.AdamW(param_groups(model, cfg.lr, cfg.gate_lr, cfg.weight_decay), lr=cfg.lr,
                                  betas=(cfg.beta1, cfg.beta2), fused=True)
    start, row = 0, 0   # steps done; the next row of the loader
    if cfg.resume:
        start, row = ckpt["step"], ckpt["row"]
        load_optimizer(optimizer, ckpt["optimizer"], cfg.name)
        changed = [f"{k} {v} -> {getattr(cfg, k)}" for k, v in ckpt["config"].items() if getattr(cfg, k, v) != v and k != "resume"]
        say(f"resuming {cfg.name} at step {start}" + (f", changed: {', '.join(changed)}" if changed else ""))
    del ckpt
    compile_parts(cfg, model, device, say)
    trained = DistributedDataParallel(model) if world > 1 else model   # gradients go through this; all else uses `model`
    say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters")
    if cfg.warmup_steps > cfg.max_steps // 2:
        say(f"note: warm-up cut from {cfg.warmup_steps} to {cfg.max_steps // 2} steps, half the run")
    peak = peak_flops(device, cfg.dtype, world)

    # -- the run's folder, made when nothing else can fail
    if rank == 0:
        try:
            os.makedirs(out, exist_ok=True)
            with open(os.path.join(out, "config.json.tmp"), "w") as f:
                json.dump(asdict(cfg), f, indent=1)
            os.replace(os.path.join(out, "config.json.tmp"), os.path.join(out, "config.json"))
            log = open_log(os.path.join(out, "log.jsonl"), start if cfg.resume else -1)
        except OSError as e:
            fail(f"cannot write to {e.filename or out}: {e.strerror}; give another --name or --out_dir")

    def record(**values):
        if rank == 0:
            whole = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}   # JSON has no NaN
            try:
                log.write(json.dumps(whole) + "\n")
            except OSError as e:
                fail(f"cannot write {log.name} ({e.strerror}); the last good checkpoint is kept; free some space, then --resume")

    def keep(step):
        if rank == 0:
            save(os.path.join(out, "ckpt.pt"), model=model.state_dict(), optimizer=optimizer.state_dict(),
                 step=step, row=row, place=list(loader.place(row)), config=asdict(cfg))

    # -- the loop: one pass more than there are steps, so that the end is evaluated and saved
    slices = world * cfg.accum_steps
    b = cfg.batch_rows // slices   # rows a rank computes in a micro-step
    twins_at = lambda step: cfg.pairs // slices if step < cfg.pair_steps else 0

    def read(first, n, count):
        """`count` of this rank's micro-batches of n rows each, the ranks' from row `first` on."""
        if device.type == "cuda":
            torch.cuda.set_device(device)   # of this thread
        batches = [loader.rows(first + (k * world + rank) * n, n) for k in range(count)]
        return [[t.pin_memory() if device.type == "cuda" and t is not None else t for t in batch] for batch in batches]

    def together(future):
        """What was read in the background, or None where that failed on any rank; and the reason if it was this one."""
        try:
            result, reason = future.result(), ""
        except SystemExit as e:   # a shard cannot be had
            result, reason = None, e.reason
        return None if any_rank(bool(reason)) else result, reason

    any_rank = lambda yes: bool(all_sum(torch.tensor(float(yes))))   # asks on the CPU: nobody waits for a GPU
    stop = []   # names of the signals that asked for an end
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, signal.SIGTERM)
        if signal.getsignal(number) is not signal.SIG_IGN:   # nohup
            signal.signal(number, lambda n, frame: stop.append(signal.Signals(n).name))
    begin = clock_start = time.monotonic()
    paused, waited, seen = 0.0, 0.0, 0   # since the last log line: seconds not spent training, spent on the data; bytes of text
    ahead, collapses = None, 0           # the next batch; evaluations in a row with collapsed boundaries
    streak, skipped, culprit = (torch.zeros(n, device=device) for n in (1, 1, 9))   # of steps that were not finite; the last
    for step in range(start, cfg.max_steps + 1):
        last = step == cfg.max_steps
        stopping = any_rank(bool(stop))   # all at the same step
        pause = time.monotonic()
        twins = twins_at(step)
        if stopping:   # whoever asked may not wait for an evaluation
            keep(step)
        if (step % cfg.eval_every == 0 or last) and not (cfg.resume and step == start):
            some = None   # of what comes next; not used up
            if cfg.chunker in SETTINGS_OF_RATE:
                some, _ = together(in_background(read, row, b - twins, 8))
            with torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bf16"):
                e, lines = look(model, val_text, cfg, rank, world)
                snr = gate_snr(model, some, twins, cfg.seed * 1000003 + step, rank, world)
            say(f"eval {step}: " + "\n".join(lines))
            record(step=step, kind="eval", seen=row * cfg.row_bytes, gate_snr=snr, **e)
            collapses = collapses + 1 if cfg.chunker in SETTINGS_OF_RATE and collapsed(e) else 0
            if collapses >= 3:
                say(f"warning: for {collapses} evaluations boundaries are almost nowhere or everywhere; {SETTINGS_OF_RATE[cfg.chunker]}")
        if (step % cfg.save_every == 0 and step > start or last) and not stopping:
            keep(step)
        paused += time.monotonic() - pause
        if last or stopping:
            break

        # the batch; rank and micro-step choose this slice of the global batch and of its noise
        waits = time.monotonic()
        batches, reason = together(ahead or in_background(read, row, b - twins, cfg.accum_steps))
        if not batches:
            keep(step)
            wait()
            fail(reason or "another rank cannot read its rows, and says why; what was trained is saved")
        waited += time.monotonic() - waits
        row += slices * (b - twins)
        seen += slices * (b - twins) * cfg.row_bytes
        ahead = in_background(read, row, b - twins_at(step + 1), cfg.accum_steps) if step + 1 < cfg.max_steps else None
        batches = [[None if t is None else t.to(device, non_blocking=True) for t in batch] for batch in batches]
        generator = torch.Generator(device).manual_seed(cfg.seed * 1000003 + step)
        u = torch.rand(cfg.batch_rows, cfg.row_bytes, generator=generator, device=device)
        u = u.view(cfg.accum_steps, world, b, cfg.row_bytes)[:, rank]

        # the step
        share = learning_rate(cfg, step)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        stats, health, bad = train_step(cfg, model, trained, optimizer, batches, u, twins)
        streak, skipped = (streak + 1) * bad, skipped + bad
        culprit = torch.where(bad, torch.cat([torch.full_like(streak, step + 1), health]), culprit)

        done = step + 1
        if done % cfg.log_every == 0 or done == cfg.max_steps:
            values = all_sum(torch.stack(list(stats.values()))) / world
            values = torch.cat([values, streak, skipped, health[1:].norm()[None], culprit]).tolist()   # a second host sync
            s, (in_a_row, n_skipped, grad_norm, sick, loss, *norms) = dict(zip(stats, values)), values[len(stats):]
            now = time.monotonic()
            took = max(now - clock_start, 1e-9)
            speed = seen / max(took - paused, 1e-9)
            flops = speed * b / (b - twins) * flops_per_byte(cfg, cfg.row_bytes, s["rate"])
            late, early = s["late"] / math.log(2), s["early"] / math.log(2)
            say(f"step {done}/{cfg.max_steps} {done / cfg.max_steps:.0%} | late {late:.3f} early {early:.3f} "
                f"| rate {s['rate']:.3f} | lr {cfg.lr * share:.2e} | grad {grad_norm:.2f} | {speed / 1e3:.1f} kB/s "
                + (f"| mfu {flops / peak:.1%} " if peak else "") +
                f"| data {waited / took:.1%} | eta {clock((now - begin) / (done - start) * (cfg.max_steps - done))}")
            record(step=done, kind="train", bytes=row * cfg.row_bytes, late_bpb=late, early_bpb=early, rate=s["rate"],
                   entropy=s.get("entropy"), advantage_std=s["advantage_sq"] ** 0.5 if "advantage_sq" in s else None,
                   lr=cfg.lr * share, grad_norm=grad_norm, kB_per_s=speed / 1e3, data_wait=waited / took, skipped=int(n_skipped))
            if n_skipped:
                what = illness(model, int(sick), loss, norms)
                say(f"warning: {int(n_skipped)} steps skipped since the last line, the latest {what}")
            if in_a_row >= 10:
                if rank == 0:
                    fail(f"{what}; {int(in_a_row)} steps in a row were skipped, weights and "
                         f"checkpoints are as before; try --resume with a lower --lr, or --dtype fp32")
                raise SystemExit(2)
            clock_start, paused, waited, seen, skipped = now, 0.0, 0.0, 0, torch.zeros_like(skipped)

    # -- the end
    wait()
    if stopping:
        say(f"stopped by {stop[0] if stop else 'another rank'} at step {step} and saved; "
            f"go on with --resume --name {cfg.name}" + (f" --out_dir {cfg.out_dir}" if cfg.out_dir != "out" else ""))
    else:
        say(f"done in {clock(time.monotonic() - begin)}; see its words: python eval.py boundaries {'' if rank else out}")
    if world > 1:
        watch.set()
        dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:   # during set-up; a run itself saves and ends by its own will
        print("stopped; nothing was under way that could be saved", file=sys.stderr)
        raise SystemExit(130)
    except RuntimeError as e:   # a collective in which another rank is missing
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and (isinstance(e, dist.DistError) or "gloo" in str(e)):
            fail("another rank is gone; its own message says why; start again with --resume")
        raise

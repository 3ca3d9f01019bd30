"""
Train a byte-level language model that learns its own tokens.

    python train.py                                    a laptop: the tiny preset on documentation you already have
    python train.py --data my_text.txt --max_steps 500     your own file, folder or glob
    python train.py --resume                           go on where the newest run stopped
    torchrun --nproc_per_node=8 train.py               eight GPUs: the 147m preset on FineWeb

Every setting is a field of TrainConfig (or of ModelConfig, in model.py) and a flag of the same name. What a run writes
is in out/<run>: ckpt.pt, config.json and log.jsonl, one JSON object a line.
"""
import argparse
import ctypes
import difflib
import glob
import inspect
import itertools
import json
import math
import os
import re
import signal
import sys
import time
from dataclasses import asdict, dataclass, fields

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from data import REPO, SHARDS, Loader, fail, load
from eval import boundaries, cut, evaluate, find_device, load_weights, plain_streams, read_checkpoint
from model import CHUNKERS, ByteLM, ModelConfig, all_sum, flops_per_byte, param_groups


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
    weight_decay: float = 0.1     # of matrices
    beta1: float = 0.9            # AdamW's averages of the gradient
    beta2: float = 0.95           # and of its square
    grad_clip: float = 1.0        # largest gradient norm; 0 = no limit
    log_every: int = 10           # steps between log lines
    eval_every: int = 500         # steps between evaluations
    eval_bytes: int = 1000000     # held-out bytes an evaluation reads at most
    save_every: int = 500         # steps between checkpoints


# paper, appendix: sizes, learning rates and warm-up; steps = its bytes / (rows * T)
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
CHOICES = dict(preset=["auto", *PRESETS], chunker=CHUNKERS, dtype=["auto", "bf16", "fp32"], compile=["auto", "on", "off"],
               schedule=["cosine", "wsd"])
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
        text = f"{comment[f.name]} (default {f.default})".replace("%", "%%")
        parser.add_argument(f"--{f.name}", help=text, metavar=f.name.upper(), **kind)
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].split("=")[0].lstrip("-")
        near = difflib.get_close_matches(name, [f.name for f in fields(TrainConfig)], 1, 0.5)
        hint = f"did you mean --{near[0]}?" if near else "see python train.py --help"
        fail(f"unknown setting {unknown[0]}; {hint}")
    return vars(given)


def settings(argv):
    """Command line -> TrainConfig, and the checkpoint it resumes or starts from (or None).

    Later ones win: defaults, preset, the checkpoint's settings (--resume: all; --init_from: the model's), flags."""
    given = parse_flags(argv)
    ckpt = None
    if given.get("resume"):
        out_dir, name = given.get("out_dir", "out"), given.get("name")
        folder = os.path.join(glob.escape(out_dir), glob.escape(name) if name else "*", "ckpt.pt")
        found = sorted(glob.glob(folder), key=os.path.getmtime)
        if not found:
            fail(f"nothing to resume: no {os.path.join(out_dir, name or '*', 'ckpt.pt')}; start a run without --resume")
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
        fast = torch.cuda.is_bf16_supported() if cfg.device == "cuda" else (
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
        libc.mallopt(-1, 2 ** 31 - 1)   # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2 ** 30)       # M_MMAP_THRESHOLD
    except (AttributeError, OSError, TypeError):
        pass   # another C library: nothing to tell


def compiler_works(device):
    """Compile a trifle. Compilers fail in many ways (none installed, no triton, no headers); all mean: run eagerly."""
    try:
        torch.compile(lambda x: x.sin() + 1)(torch.zeros(8, device=device))
        return True
    except Exception as e:
        print(f"no working compiler ({type(e).__name__}): running eagerly", flush=True)
        return False


def save(path, **content):
    """Write a checkpoint beside its place, flush it to the disk, then rename: a kill leaves the old or the new one."""
    tmp = f"{path}.tmp"
    try:
        with open(tmp, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(tmp, path)
    except (OSError, RuntimeError) as e:   # torch turns a full disk into a RuntimeError
        if os.path.exists(tmp):
            os.remove(tmp)
        fail(f"cannot save {path} ({str(e).splitlines()[0]}); the last good checkpoint is kept")


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
    """Copy the optimiser's state, which must be of the same parameters."""
    try:
        optimizer.load_state_dict(state)
        for p, s in optimizer.state.items():
            if s["exp_avg"].shape != p.shape or s["exp_avg_sq"].shape != p.shape:
                raise ValueError("another shape")
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as e:
        fail(f"{name} holds the optimiser of another model ({e}); --init_from takes its weights alone")


def run_folder(cfg):
    """A folder for a new run: the one asked for, or a fresh one named after preset and data."""
    if cfg.name:
        path = os.path.join(cfg.out_dir, cfg.name)
        if os.path.exists(os.path.join(path, "ckpt.pt")) and not cfg.resume:
            fail(f"{path} holds a run already; --resume goes on with it, another --name starts beside it")
        return path
    base = f"{cfg.preset}-{re.sub(r'[^A-Za-z0-9_-]+', '-', os.path.basename(os.path.normpath(cfg.data))).strip('-')}"
    names = itertools.chain([base], (f"{base}-{k}" for k in itertools.count(2)))
    cfg.name = next(n for n in names if not os.path.exists(os.path.join(cfg.out_dir, n)))
    return os.path.join(cfg.out_dir, cfg.name)


def clock(seconds):
    seconds = int(seconds)
    return f"{seconds // 3600}h{seconds // 60 % 60:02d}m" if seconds >= 3600 else f"{seconds // 60}m{seconds % 60:02d}s"


PEAK_TFLOPS = {"H200": 989, "H100": 989, "A100": 312, "L40S": 362, "RTX 4090": 165, "RTX 3090": 71}   # bf16, dense


def peak_flops(device, world):
    """FLOP/s that all GPUs have together, or None where that is not known."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return next((v * 1e12 * world for k, v in PEAK_TFLOPS.items() if k in name), None)


def gate_snr(model, loader, row, b, twins, seed, rank, world, micro=8):
    """Signal to noise of the chunker's gradient: norm of its mean over norm of its deviation, across `micro` micro-batches a
    rank of b rows to come, which are not used up. The mean's own noise is taken off: 0 means that no signal shows."""
    parameters = list(model.chunker.parameters())
    if not parameters:
        return math.nan
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    grads = []
    for k in range(micro):
        u = torch.rand(world, b, loader.T, generator=generator, device=parameters[0].device)[rank]
        x, y, _ = loader.rows(row + (k * world + rank) * (b - twins), b - twins)
        loss = model(x.to(u.device), y.to(u.device), u, twins)["loss"]
        grads.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)]))
    grads, n = torch.stack(grads), micro * world                # (micro, parameters)
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


def main(argv=None):
    # -- set-up
    plain_streams()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cfg, ckpt = settings(argv)
    check(cfg, world)
    stop = []   # names of the signals that asked for an end
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:   # nohup
            signal.signal(number, lambda n, frame: stop.append(signal.Signals(n).name))

    def say(text):
        if rank == 0:
            try:
                print(text, flush=True)
            except BrokenPipeError:   # whoever read along has left; the run goes on
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    keep_freed_memory()
    device = torch.device(cfg.device)
    if world > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")   # evaluation sums on the CPU
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
                                  betas=(cfg.beta1, cfg.beta2), fused=device.type != "mps")
    start, row = 0, 0   # steps done; the next row of the loader
    if cfg.resume:
        start, row = ckpt["step"], ckpt["row"]
        load_optimizer(optimizer, ckpt["optimizer"], cfg.name)
        if start > cfg.max_steps:
            fail(f"--max_steps {cfg.max_steps}: {cfg.name} is at step {start} already; give {start} or more")
        say(f"resuming {cfg.name} at step {start}")
    del ckpt
    if (cfg.compile == "on" or cfg.compile == "auto" and device.type == "cuda") and compiler_works(device):
        model.encoder.compile()   # in place and part by part: the names in a checkpoint stay as they are
        model.decoder.compile()
        model.main.compile(dynamic=True)   # the number of chunks changes from step to step
    trained = DistributedDataParallel(model) if world > 1 else model   # gradients go through this; all else uses `model`
    say(f"model: {sum(p.numel() for p in model.parameters()):,} parameters, "
        f"{flops_per_byte(cfg, cfg.row_bytes, cfg.rate) / 1e6:.1f} MFLOP a byte at rate {cfg.rate:g}")
    if cfg.warmup_steps > cfg.max_steps // 2:
        say(f"note: warm-up cut from {cfg.warmup_steps} to {cfg.max_steps // 2} steps, half the run")
    autocast = lambda: torch.autocast(device.type, torch.bfloat16, enabled=cfg.dtype == "bf16")
    peak = peak_flops(device, world)

    # -- the run's folder, made when nothing else can fail
    if rank == 0:
        try:
            os.makedirs(out, exist_ok=True)
            with open(os.path.join(out, "config.json.tmp"), "w") as f:
                json.dump(asdict(cfg), f, indent=1)
            os.replace(os.path.join(out, "config.json.tmp"), os.path.join(out, "config.json"))
            log = open_log(os.path.join(out, "log.jsonl"), start if cfg.resume else -1)
        except OSError as e:
            fail(f"cannot write to {out}: {e.strerror}; give --out_dir a folder that can be written")

    def record(**values):
        if rank == 0:
            log.write(json.dumps({k: None if v != v else v for k, v in values.items()}) + "\n")   # JSON has no NaN

    def keep(step):
        save(os.path.join(out, "ckpt.pt"), model=model.state_dict(), optimizer=optimizer.state_dict(),
             step=step, row=row, place=list(loader.place(row)), config=asdict(cfg))

    # -- the loop: one pass more than there are steps, so that the end is evaluated and saved
    parts = world * cfg.accum_steps
    b = cfg.batch_rows // parts   # rows a rank computes in a micro-step
    begin = clock_start = time.time()
    paused, seen = 0.0, 0   # since the last log line: seconds not spent training, bytes of text
    for step in range(start, cfg.max_steps + 1):
        last = step == cfg.max_steps
        stopping = bool(stop)
        if world > 1:   # ranks must stop together; they ask each other at every log line
            asked = step % cfg.log_every == 0 or last
            stopping = asked and bool(all_sum(torch.tensor(float(stopping), device=device)))

        pause = time.time()
        twins = cfg.pairs // parts if step < cfg.pair_steps else 0
        if (step % cfg.eval_every == 0 or last) and not (cfg.resume and step == start):
            with autocast():
                e, lines = look(model, val_text, cfg, rank, world)
                snr = gate_snr(model, loader, row, b, twins, cfg.seed * 1000003 + step, rank, world)
            say(f"eval {step}: " + "\n".join(lines))
            record(step=step, kind="eval", seen=row * cfg.row_bytes, gate_snr=snr, **e)
        if rank == 0 and (step % cfg.save_every == 0 and step > start or last or stopping):
            keep(step)
        paused += time.time() - pause
        if last or stopping:
            break

        # one step; rank and micro-step choose this slice of the global batch and of its noise
        share = learning_rate(cfg, step)
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * share
        generator = torch.Generator(device).manual_seed(cfg.seed * 1000003 + step)
        u = torch.rand(cfg.batch_rows, cfg.row_bytes, generator=generator, device=device)
        stats = 0
        for micro in range(cfg.accum_steps):
            part = micro * world + rank
            try:
                batch = loader.rows(row + part * (b - twins), b - twins)
            except SystemExit:   # a shard cannot be had, and says so; nothing is lost
                if rank == 0:
                    keep(step)
                raise
            x, y, token_start = (None if t is None else t.to(device) for t in batch)
            if world > 1:   # before forward, or it has no effect
                trained.require_backward_grad_sync = micro == cfg.accum_steps - 1
            with autocast():
                result = trained(x, y, u[part * b:(part + 1) * b], twins, token_start)
            (result["loss"] / cfg.accum_steps).backward()
            stats = stats + torch.stack(list(result["stats"].values()))
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.grad_clip or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        row += parts * (b - twins)
        seen += parts * (b - twins) * cfg.row_bytes

        done = step + 1
        if done % cfg.log_every == 0 or done == cfg.max_steps:
            s = dict(zip(result["stats"], (all_sum(stats) / parts).tolist()))   # means over micro-steps and ranks
            now = time.time()
            speed = seen / (now - clock_start - paused)
            flops = speed * b / (b - twins) * flops_per_byte(cfg, cfg.row_bytes, s["rate"])
            mfu = f"{flops / peak:.1%}" if peak else "n/a"
            clock_start, paused, seen = now, 0.0, 0
            late, early = s["late"] / math.log(2), s["early"] / math.log(2)
            say(f"step {done}/{cfg.max_steps} {done / cfg.max_steps:.0%} | late {late:.3f} early {early:.3f} "
                f"| rate {s['rate']:.3f} | lr {cfg.lr * share:.2e} | grad {float(grad_norm):.2f} | {speed / 1e3:.1f} kB/s "
                f"| mfu {mfu} | eta {clock((now - begin) / (done - start) * (cfg.max_steps - done))}")
            record(step=done, kind="train", bytes=row * cfg.row_bytes, late_bpb=late, early_bpb=early, rate=s["rate"],
                   entropy=s.get("entropy"), advantage_std=s["advantage_sq"] ** 0.5 if "advantage_sq" in s else None,
                   lr=cfg.lr * share, grad_norm=float(grad_norm), kB_per_s=speed / 1e3)

    # -- the end
    wait()
    if stopping:
        say(f"stopped by {stop[0] if stop else 'another rank'} at step {step} and saved; "
            f"go on with: python train.py --resume --name {cfg.name}")
    else:
        say(f"done in {clock(time.time() - begin)}; see its words: python eval.py boundaries {'' if rank else out}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

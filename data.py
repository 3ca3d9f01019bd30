"""
Text in, rows of bytes out. A corpus is one flat array of uint8 and the offsets at which its documents start:

    docs       the English prose in the docstrings of the installed Python, NumPy and PyTorch: no download
    any path   a file, a folder or a glob; bytes are taken as they are, whatever their encoding
    fineweb    (its place is `load`, below)

A row starts with SEPARATOR (id 256), which no text can contain, and goes on with T-1 bytes; where one document ends
and the next begins, another SEPARATOR stands between them. Position i predicts id i+1. A separator is never a target.
"""
import ast
import functools
import glob
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import warnings
import zipfile
from pathlib import Path

import numpy as np
import torch

from model import NO_TARGET, SEPARATOR

VAL_SHARE = 0.05          # of the documents, or of the bytes where there are few documents
FEW_DOCUMENTS = 20


def fail(message):
    """End with one line for the user: `error: what, where, what to do`, exit code 2."""
    print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
    raise SystemExit(2)


# ---------------------------------------------------------------------------------------------------------------------
# corpora

class Corpus:
    """Documents laid end to end: data (n,) uint8, and starts, the offset of each document's first byte.

    Its stream is the documents with one SEPARATOR between neighbours, len(corpus) = n + documents - 1 ids.
    token_start (n,) bool, set by mark_tokens, says where GPT-2's tokens begin; only the chunker `bpe` asks for it.
    """

    def __init__(self, data, starts=(0,), name="text"):
        self.data, self.name, self.token_start = data, name, None
        self.starts = np.asarray(starts, dtype=np.int64)
        self.ends = np.append(self.starts[1:], len(data))
        self.shifted = self.starts + np.arange(len(self.starts))   # where documents start in the stream

    def __len__(self):
        return len(self.data) + len(self.starts) - 1

    def read(self, pos):
        """Ids (int64, 0..256) at positions `pos` (any shape) of the stream."""
        doc = np.searchsorted(self.shifted, pos, side="right") - 1
        i = pos - doc                                               # `doc` separators stand before this byte
        byte = self.data[np.minimum(i, len(self.data) - 1)].astype(np.int64)
        return np.where(i == self.ends[doc], SEPARATOR, byte)

    def window(self, first, T):
        """Rows that start at stream positions `first` (B,) -> x, y (B,T) int64, and token_start (B,T) bool or None.

        Past the end there is no target. Separators count as tokens."""
        pos = np.asarray(first)[:, None] + np.arange(T)             # (B, T)
        inside = pos < len(self)
        ids = self.read(np.minimum(pos, len(self) - 1))
        y = np.where(inside & (ids != SEPARATOR), ids, NO_TARGET)
        x = np.concatenate([np.full((len(pos), 1), SEPARATOR), ids[:, :-1]], 1)
        token_start = None
        if self.token_start is not None:
            before = np.maximum(np.minimum(pos, len(self)) - 1, 0)  # the stream position that x holds
            byte = before - np.searchsorted(self.shifted, before, side="right") + 1
            token_start = self.token_start[np.minimum(byte, len(self.data) - 1)] | (x == SEPARATOR)
            token_start = torch.from_numpy(token_start)
        return torch.from_numpy(x), torch.from_numpy(y), token_start

    def mark_tokens(self):
        """Find where GPT-2's tokens begin, document by document; bytes that are no UTF-8 are tokens of their own."""
        encoding, length = gpt2()
        self.token_start = np.zeros(len(self.data), dtype=bool)
        for start, end in zip(self.starts, self.ends):
            text = bytes(self.data[start:end]).decode("utf-8", "surrogateescape")
            for run in re.findall("[\udc80-\udcff]+|[^\udc80-\udcff]+", text):
                if "\udc80" <= run[0] <= "\udcff":
                    steps = np.ones(len(run), np.int64)
                else:
                    steps = length[encoding.encode_ordinary(run)]
                self.token_start[start + np.cumsum(steps) - steps] = True
                start += steps.sum()
        return self


@functools.cache
def gpt2():
    """tiktoken's GPT-2 encoding, and the bytes (50257,) in each of its tokens."""
    try:
        import tiktoken
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as e:   # no package, no network, a proxy's error page, a full disk: all mean the same here
        fail(f"--chunker bpe needs the GPT-2 vocabulary, which tiktoken could not get ({type(e).__name__}); connect once, "
             f"or set TIKTOKEN_CACHE_DIR to a folder that a machine with a network has filled")
    return encoding, np.array([len(encoding.decode_single_token_bytes(i)) for i in range(encoding.n_vocab)])


def load(data, data_dir="data"):
    """Settings -> (train, val) corpora. Raises SystemExit(2) with a line on anything that cannot be read."""
    if data == "fineweb":
        fail("fineweb: this version has no FineWeb reader; use --data docs, or --data PATH for your own text")
    if data == "docs":
        name = f"docs-prose-py{sys.version_info[0]}.{sys.version_info[1]}-np{np.__version__}-torch{torch.__version__}"
        return packed(Path(data_dir) / name.replace("+", "-"), docstrings)
    files = expand(data)
    try:
        if len(files) == 1:   # read where it lies
            raw = np.memmap(files[0], dtype=np.uint8, mode="r")
            return split(raw, np.zeros(1, np.int64), cut=None, name=data)
        state = [(str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
        key = hashlib.sha256(repr(state).encode()).hexdigest()
        return packed(Path(data_dir) / f"packed-{key[:16]}", lambda: files, data)
    except OSError as e:
        fail(f"cannot read {e.filename or data}: {e.strerror or e}")


def expand(data):
    """A file, folder or glob -> its non-empty files, sorted. Hidden files and folders are left out."""
    if os.path.isdir(data):
        def unreadable(e):
            fail(f"cannot read {e.filename}: {e.strerror}")
        found = []
        for root, folders, names in os.walk(data, onerror=unreadable):
            folders[:] = [d for d in folders if not d.startswith(".")]
            found += [Path(root) / n for n in names if not n.startswith(".")]
    else:
        found = [Path(p) for p in ([data] if os.path.exists(data) else glob.glob(data, recursive=True))]
    found = [f for f in found if f.is_file()]
    if not found:
        fail(f"no such file, folder or glob: {data}; give --data a path that exists, or docs")
    files = sorted(f for f in found if f.stat().st_size)
    if not files:
        fail(f"nothing but empty files: {data}; give --data a path with text in it")
    return files


def packed(path, documents, name="docs"):
    """Documents (bytes or files) packed once into path.bin (bytes) and path.npz (starts, cut), then memory-mapped.

    Many documents are ordered by their hash, which shuffles them; the last VAL_SHARE of the hashes are held out.
    Few keep their order, and the last VAL_SHARE of each is held out: all heads are packed first, then all tails.
    Files are written under another name and renamed, the index last, so a half cache is no cache.
    """
    index = path.with_suffix(path.suffix + ".npz")
    flat = path.with_suffix(path.suffix + ".bin")
    if not usable(index, flat):
        read = lambda d: d if isinstance(d, bytes) else d.read_bytes()
        docs = list(documents())
        if len(docs) < FEW_DOCUMENTS:
            docs = [read(d) for d in docs]
            heads = [len(d) - max(1, int(VAL_SHARE * len(d))) for d in docs]
            docs = [d[:n] for d, n in zip(docs, heads)] + [d[n:] for d, n in zip(docs, heads)]
            cut = len(heads)
        else:
            keyed = sorted((hashlib.sha256(read(d)).digest(), i) for i, d in enumerate(docs))
            docs = [docs[i] for _, i in keyed]
            cut = sum(h[0] / 256 < 1 - VAL_SHARE for h, _ in keyed)
        path.parent.mkdir(parents=True, exist_ok=True)
        starts, n = [], 0
        tmp = f"{flat}.{os.getpid()}.tmp"
        with open(tmp, "wb") as f:
            for d in docs:
                starts.append(n)
                n += f.write(read(d))
        os.replace(tmp, flat)
        with open(tmp, "wb") as f:
            np.savez(f, starts=np.array(starts, np.int64), cut=cut, size=n)
        os.replace(tmp, index)
    with np.load(index) as z:
        starts, cut = z["starts"], int(z["cut"])
    return split(np.memmap(flat, dtype=np.uint8, mode="r"), starts, cut, name)


def usable(index, flat):
    """Whether a packed corpus is there and whole."""
    try:
        with np.load(index) as z:
            return int(z["size"]) == flat.stat().st_size
    except (OSError, KeyError, ValueError, zipfile.BadZipFile):
        return False


def split(data, starts, cut, name):
    """(train, val): val is the documents from number `cut` on, or without a cut the last VAL_SHARE of the bytes."""
    at = int(starts[cut]) if cut is not None else len(data) - max(1, int(VAL_SHARE * len(data)))
    if at < 1:
        fail(f"text too short: {name} has {len(data)} bytes, too few to hold any out; give more text")
    before, after = starts[starts < at], starts[starts > at] - at
    return Corpus(data[:at], before, name), Corpus(data[at:], np.append(0, after), name)


def doc_roots():
    """The folders of the standard library, NumPy and PyTorch."""
    packages = [os.path.dirname(importlib.util.find_spec(m).origin) for m in ("numpy", "torch")]
    return [sysconfig.get_path("stdlib"), *packages]


def docstrings():
    """The prose of every docstring below doc_roots(), without repeats (about 6 MB), in half a minute."""
    found = set()
    for root in doc_roots():
        files = sorted(Path(root).rglob("*.py"))
        files = [f for f in files if "site-packages" not in f.relative_to(root).parts]
        for k, f in enumerate(files):
            if k % 100 == 0:
                name = os.path.basename(root)
                print(f"\rdocs: reading docstrings of {name}, file {k} of {len(files)}  ", end="", flush=True)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    tree = ast.parse(f.read_bytes())
            except (SyntaxError, ValueError, OSError):
                continue   # the standard library ships some files that are wrong on purpose
            for node in ast.walk(tree):
                if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                    found.add(prose(ast.get_docstring(node) or ""))
    found = sorted(d.encode("utf-8", "replace") for d in found if d)
    print(f"\rdocs: {len(found)} docstrings, {sum(map(len, found)):,} bytes" + " " * 40)
    return found


def prose(text):
    """The paragraphs of a docstring that are sentences, one a line: no tables, code, or doctests."""
    paragraphs = [" ".join(p.split()) for p in text.split("\n\n")]
    return "\n".join(p for p in paragraphs if len(p) >= 20 and ">>>" not in p
                     and sum(c.isalpha() or c == " " for c in p) >= 0.9 * len(p))


# ---------------------------------------------------------------------------------------------------------------------
# the training stream

class Loader:
    """An endless, shuffled stream of rows, numbered 0, 1, 2, ...: row r is a function of (corpus, T, seed, r) alone.

    Each epoch cuts the corpus into windows of T from a random offset and visits all of them in random order. To resume,
    remember the next row's number; ranks stay disjoint by taking different numbers.
    """

    def __init__(self, corpus, T, seed):
        if len(corpus) < T:
            fail(f"text too short: {corpus.name} has {len(corpus)} bytes to train on, one row takes {T}; "
                 f"give more text" + (f" or --row_bytes {len(corpus)}" if len(corpus) > 1 else ""))
        self.corpus, self.T, self.seed = corpus, T, seed
        self.n = max(1, len(corpus) // T - 1)                        # windows an epoch; one less leaves room to shift
        self.epoch = -1

    def rows(self, first, count):
        """Rows first .. first+count-1, as Corpus.window."""
        starts = []
        for r in range(first, first + count):
            epoch, k = divmod(r, self.n)
            if epoch != self.epoch:
                rng = np.random.default_rng((self.seed, epoch))
                self.order, self.epoch = rng.permutation(self.n), epoch
                self.offset = rng.integers(len(self.corpus) - self.n * self.T + 1)
            starts.append(self.offset + self.order[k] * self.T)
        return self.corpus.window(starts, self.T)

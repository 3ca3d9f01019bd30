"""
Text in, rows of bytes out. A corpus is one flat array of uint8 and the offsets at which its documents start:

    docs       the English prose in the docstrings of the installed Python, NumPy and PyTorch: no download
    any path   a file, a folder or a glob; bytes are taken as they are, whatever their encoding
    fineweb    web text in shards of GPT-2 tokens, fetched as they are needed and turned back into bytes

    python data.py fineweb --shards 14          fetch shards ahead of a run; a second call fetches nothing
    python data.py check data/fineweb10B-gpt2   verify shards: a file or a folder
    python data.py write TEXT OUT.bin           make a shard from text, a document a line or between blank lines

A row starts with SEPARATOR (id 256), which no text can contain, and goes on with T-1 bytes; where one document ends
and the next begins, another SEPARATOR stands between them. Position i predicts id i+1. A separator is never a target.
"""
import argparse
import ast
import contextlib
import functools
import glob
import hashlib
import importlib.util
import os
import re
import sys
import sysconfig
import threading
import time
import warnings
import zipfile
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import requests
import torch

from model import NO_TARGET, SEPARATOR

REPO, SHARDS = "kjj0/fineweb10B-gpt2", 103   # a dataset on the Hugging Face hub, and how many shards it has to train on
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 1024   # a shard: 256 int32, these two and the number of ids first; then uint16 ids
END_OF_TEXT = 50256       # the id before every document, and the largest there is
RETRIES, PAUSE = 7, 1.0   # tries without progress before a download is given up; seconds before the second, then doubled
VAL_SHARE = 0.05          # of the documents, or of the bytes where there are few documents
FEW_DOCUMENTS = 20


def fail(message):
    """End with one line for the user: `error: what, where, what to do`, exit code 2. In the background nothing is shown: the
    one who asks for the result finds the line in .reason."""
    end = SystemExit(2)
    end.reason = " ".join(str(message).splitlines())
    if threading.current_thread() is threading.main_thread():
        print("error:", end.reason, file=sys.stderr, flush=True)
    raise end


def in_background(call, *args):
    """Run call(*args) in a thread of its own -> Future. Unlike an executor's threads, it never holds up the program's end."""
    future = Future()

    def work():
        try:
            future.set_result(call(*args))
        except BaseException as e:   # SystemExit, too: whoever asks for the result gets it
            future.set_exception(e)

    threading.Thread(target=work, daemon=True).start()
    return future


# ---------------------------------------------------------------------------------------------------------------------
# corpora

class Corpus:
    """Documents laid end to end: data (n,) uint8, and starts, the offset of each document's first byte.

    Its stream is the documents with one SEPARATOR between neighbours, len(corpus) = n + documents - 1 ids.
    token_start (n,) bool, set by mark_tokens, says where GPT-2's tokens begin; only the chunker `bpe` asks for it.
    With doc_bytes every document has that length, and rows that divide it start with documents and never cross them.
    """

    def __init__(self, data, starts=(0,), name="text", doc_bytes=0):
        self.data, self.name, self.token_start, self.doc_bytes = data, name, None, doc_bytes
        self.starts = np.asarray(starts, dtype=np.int64)
        self.ends = np.append(self.starts[1:], len(data))
        self.shifted = self.starts + np.arange(len(self.starts))   # where documents start in the stream

    def __len__(self):
        return len(self.data) + len(self.starts) - 1

    def __str__(self):
        return f"{len(self.data):,} bytes"

    def by_document(self, T):
        """Whether rows of T bytes start with documents and fill them."""
        return self.doc_bytes > 0 and self.doc_bytes % T == 0

    def row_starts(self, T):
        """Stream positions of rows of T bytes that together hold the text once."""
        if self.by_document(T):
            return (self.shifted[:, None] + np.arange(0, self.doc_bytes, T)).ravel()
        return np.arange(0, len(self), T)

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
        """Find where GPT-2's tokens begin, document by document."""
        if self.token_start is None:
            length = gpt2()[1]
            self.token_start = np.zeros(len(self.data), dtype=bool)
            for start, end in zip(self.starts, self.ends):
                steps = length[tokenize(bytes(self.data[start:end]))]
                self.token_start[start + np.cumsum(steps) - steps] = True
        return self


@functools.cache
def gpt2():
    """tiktoken's GPT-2 encoding, the length (50257,) of each token in bytes, 0 for END_OF_TEXT, and the bytes of each."""
    try:
        import tiktoken
        encoding = tiktoken.get_encoding("gpt2")
    except Exception as e:   # no package, no network, a proxy's error page, a full disk: all mean the same here
        fail(f"fineweb and --chunker bpe need the GPT-2 vocabulary, which tiktoken could not get ({type(e).__name__}); connect "
             f"once, or set TIKTOKEN_CACHE_DIR to a folder that a machine with a network has filled")
    tokens = [encoding.decode_single_token_bytes(i) for i in range(END_OF_TEXT)] + [b""]
    return encoding, np.array([len(t) for t in tokens], np.int32), tokens


def tokenize(text):
    """Bytes -> GPT-2 ids (n,); bytes that are no UTF-8 become tokens of their own."""
    encoding, ids = gpt2()[0], []
    for run in re.findall("[\udc80-\udcff]+|[^\udc80-\udcff]+", text.decode("utf-8", "surrogateescape")):
        if "\udc80" <= run[0] <= "\udcff":
            ids += [encoding.encode_single_token(bytes([ord(c) - 0xDC00])) for c in run]
        else:
            ids += encoding.encode_ordinary(run)
    return np.array(ids, np.int64)


def load(data, data_dir="data", repo=REPO, shards=SHARDS, min_doc_bytes=4096):
    """Settings -> (train, val): a corpus each, or Shards to train on. SystemExit(2) with a line where text cannot be read."""
    if data == "fineweb":
        val = Shards(repo, data_dir, [0], min_doc_bytes)[0]
        return Shards(repo, data_dir, range(1, shards + 1), min_doc_bytes), val
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
            if k % 100 == 0 and sys.stdout.isatty():
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
# FineWeb: shards of GPT-2 tokens, fetched, verified, and turned into bytes

class Shards:
    """Shards of a dataset as a sequence of corpora. Asked for one, it fetches and reads the next in the background; three stay
    in memory."""

    def __init__(self, repo, data_dir, numbers, min_doc_bytes):
        self.folder = os.path.join(data_dir, repo.split("/")[-1])
        self.repo, self.numbers, self.min_doc_bytes, self.marked = repo, numbers, min_doc_bytes, False
        self.corpora = {}   # index: Future of a Corpus

    def __len__(self):
        return len(self.numbers)

    def __str__(self):
        return f"{len(self)} shards in {self.folder}"

    def __getitem__(self, k):
        near = [i % len(self) for i in (k, k + 1, k - 1)]
        self.corpora = {i: f for i, f in self.corpora.items() if i in near and not (f.done() and f.exception())}   # try again
        self.begin(k)
        try:
            corpus = self.corpora[k].result()
        except SystemExit as e:
            fail(e.reason)
        self.begin(near[1])   # when this one is there, so that they do not share the line
        return corpus

    def begin(self, k):
        if k not in self.corpora:
            self.corpora[k] = in_background(self.read, k)

    def mark_tokens(self):
        self.marked = True
        return self

    def read(self, k):
        path = fetch_shard(self.numbers[k], self.folder, self.repo)
        return read_shard(path, self.min_doc_bytes, self.marked or not self.numbers[k])


def fetch_shard(number, folder, repo=REPO):
    """Shard `number` of the hub's dataset (0 is for validation) in folder -> its path. HF_ENDPOINT and HF_TOKEN are honoured."""
    name = f"fineweb_train_{number:06d}.bin" if number else "fineweb_val_000000.bin"
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
    return fetch(f"{hub}/datasets/{repo}/resolve/main/{name}", Path(folder) / name, verify, os.environ.get("HF_TOKEN"))


def shard_ids(path):
    """A shard's ids, uint16 (n,), read into memory: what happens to the file later does not matter. ValueError with the reason
    where it is not a whole shard with ids in range."""
    size = os.path.getsize(path)
    if size < HEADER_BYTES:
        raise ValueError(f"only {size} bytes")
    header = np.fromfile(path, dtype="<i4", count=256)
    if header[0] != MAGIC or header[1] != VERSION:
        page = bytes(header.tobytes()[:200]).lstrip()[:1] == b"<"
        raise ValueError("a web page" if page else f"magic {header[0]}, version {header[1]}, not {MAGIC} and {VERSION}")
    ids = np.fromfile(path, dtype="<u2", offset=HEADER_BYTES)
    if header[2] < 1 or len(ids) != header[2] or size != HEADER_BYTES + 2 * len(ids):
        raise ValueError(f"{size} bytes, but {HEADER_BYTES + 2 * int(header[2])} by its header")
    if ids.max() > END_OF_TEXT:
        raise ValueError(f"id {ids.max()}, more than {END_OF_TEXT}")
    return ids


def verify(path, sha256=None):
    """How many ids a shard has; ValueError with the reason where it is not whole, or its hash not this one."""
    n = len(shard_ids(path))
    if sha256:
        check_hash(path, sha256)
    return n


def check_hash(path, sha256):
    """ValueError where the file's sha256 does not start so."""
    found = hashlib.sha256()
    with open(path, "rb") as f:
        while piece := f.read(1 << 20):
            found.update(piece)
    if not found.hexdigest().startswith(sha256):
        raise ValueError(f"sha256 {found.hexdigest()[:8]}..., not {sha256[:8]}...")


def read_shard(path, min_doc_bytes=0, mark=False):
    """A shard -> Corpus. What stands before its first END_OF_TEXT is the rest of another shard's document: left out.

    With min_doc_bytes, documents of fewer bytes are left out, and longer ones are cut to it (paper, section 4); else all
    are packed. mark keeps the tokens' first bytes. Works block by block; needs two to four times the text's size.
    """
    try:
        ids = shard_ids(path)
    except (ValueError, OSError) as e:
        fail(f"{path} is not a shard ({e}); remove it, and it is fetched again")
    _, length, tokens = gpt2()
    flat, offset = np.frombuffer(b"".join(tokens), np.uint8), np.cumsum(length, dtype=np.int32) - length
    block = 1 << 16                                                 # ids at a time, so that work stays in the cache
    blocks = [ids[i:i + block] for i in range(0, len(ids), block)]
    data = np.empty(sum(int(length.take(b).sum()) for b in blocks), np.uint8)
    token_start = np.zeros(len(data), bool) if mark else None
    count = np.arange(block * int(length.max()), dtype=np.int32)
    starts, n = [], 0
    for b in blocks:
        steps = length.take(b)
        end = np.cumsum(steps, dtype=np.int32)
        starts.append(n + end[b == END_OF_TEXT].astype(np.int64))   # such an id has no bytes: here the next document starts
        index = np.repeat(offset.take(b) - end + steps, steps)
        index += count[:len(index)]                                 # the byte's place in `flat`
        flat.take(index, mode="clip", out=data[n:n + len(index)])
        if mark:
            token_start[n + (end - steps)[steps > 0]] = True
        n += len(index)
    starts = np.unique(np.concatenate(starts))
    starts = starts[starts < n]                                     # an empty last document has nothing to read
    if min_doc_bytes:
        starts = starts[np.diff(np.append(starts, n)) >= min_doc_bytes]
        keep = lambda t: np.concatenate([t[s:s + min_doc_bytes] for s in starts])
    else:
        keep = lambda t: t[starts[0]:]
    if not len(starts):
        fail(f"{path} has no document" + (f" of {min_doc_bytes} bytes; lower --min_doc_bytes" if min_doc_bytes else ""))
    corpus = Corpus(keep(data), np.arange(len(starts)) * min_doc_bytes if min_doc_bytes else starts - starts[0], str(path), min_doc_bytes)
    corpus.token_start = keep(token_start) if mark else None
    return corpus


@contextlib.contextmanager
def locked(f):
    """Only one process at a time writes to f; the others wait here. Where locks do not exist, none is taken."""
    try:
        import fcntl
        fcntl.flock(f, fcntl.LOCK_EX)
    except (ImportError, OSError):
        pass
    yield   # closing the file frees the lock


def fetch(url, path, check, token=None):
    """Download a file unless it is there -> its path. Written to NAME.part, which the next try goes on with; check(part,
    sha256 that the server names or None) raises ValueError where it is not what it should be; then renamed."""
    if path.exists():
        return path
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "ab") as f, locked(f):
            if path.exists():   # another process has been faster
                with contextlib.suppress(FileNotFoundError):
                    part.unlink()
                return path
            sha256 = download(url, f, path.name, token)
            f.flush()
            os.fsync(f.fileno())
            try:
                check(part, sha256)
            except (ValueError, zipfile.BadZipFile) as e:
                f.truncate(0)   # not unlinked: another process may wait for this very file
                fail(f"{url} is not what it should be: {e}; try again, or put {path.name} into {path.parent} by other means")
            os.replace(part, path)
    except requests.RequestException as e:
        fail(f"cannot download {url} ({type(e).__name__}); try again, what came is kept; or put {path.name} into {path.parent}")
    except OSError as e:
        fail(f"cannot write {part}: {e.strerror or e}; free some space or give another folder")
    return path


def download(url, f, name, token):
    """Append to f what it lacks of url -> the sha256 that the server names, or None. Growing pauses between tries."""
    tries, most, sha256 = 0, 0, None
    while True:
        have = f.seek(0, os.SEEK_END)
        headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
        try:
            with requests.get(url, headers=headers | ({"Authorization": f"Bearer {token}"} if token else {}), stream=True,
                              timeout=30) as r:
                for answer in (*r.history, r):   # the hub names the hash before it redirects
                    tag = answer.headers.get("X-Linked-ETag", "").strip('W/"')
                    sha256 = tag if re.fullmatch("[0-9a-f]{64}", tag) else sha256
                if r.status_code == 416:   # nothing behind what is here: it is whole, or not of this file
                    if r.headers.get("Content-Range", "").endswith(f"/{have}"):
                        return sha256
                    f.truncate(0)
                    raise requests.ConnectionError("HTTP 416")
                if r.status_code == 429 or r.status_code >= 500:
                    raise requests.ConnectionError(f"HTTP {r.status_code}")
                if r.status_code >= 400:
                    fail(f"{url}: HTTP {r.status_code}; " + ("there is no such file; check the name" if r.status_code == 404 else "a token in HF_TOKEN may help"))
                if have and r.status_code == 200:   # the server does not know ranges: from the start
                    f.truncate(0)
                    have = 0
                total = have + int(r.headers.get("Content-Length", 0))
                begin, shown, start = time.monotonic(), 0.0, have
                for piece in r.iter_content(1 << 16):
                    f.write(piece)
                    have += len(piece)
                    if have > most:   # progress
                        most, tries = have, 0
                    if time.monotonic() - shown > 0.5 or have == total:
                        shown = time.monotonic()
                        speed = (have - start) / max(shown - begin, 1e-3)
                        left = max(total - have, 0) / max(speed, 1)
                        print(f"\r{name}: {have / 1e6:.0f} of {total / 1e6:.0f} MB, {speed / 1e6:.1f} MB/s, {left:.0f} s left   ",
                              end="\n" if have == total else "", file=sys.stderr, flush=True)
                if have < total:
                    raise requests.ConnectionError("cut off")
                return sha256
        except requests.RequestException as e:
            tries += 1
            if tries >= RETRIES or isinstance(e, ValueError):   # a URL that cannot be
                raise
            wait = PAUSE * 2 ** (tries - 1)
            print(f"\n{name}: {str(e)[:80] or type(e).__name__}; again in {wait:.0f} s", file=sys.stderr, flush=True)
            time.sleep(wait)


def write_shard(text, path):
    """Documents (an iterable of bytes) -> a shard at path, and how many ids it has."""
    ids = np.concatenate([np.append(END_OF_TEXT, tokenize(d)) for d in text]).astype("<u2")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, len(ids)
    tmp = f"{path}.tmp"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(tmp, "wb") as f:
        f.write(header.tobytes() + ids.tobytes())
    os.replace(tmp, path)
    return len(ids)


# ---------------------------------------------------------------------------------------------------------------------
# the training stream

class Loader:
    """An endless, shuffled stream of rows, numbered 0, 1, 2, ...: row r is a function of (text, T, seed, r) alone.

    Each epoch visits the shards in order (plain text is a single one) and the rows of each in random order; where rows do
    not start with documents, they are windows of T from a random offset. To resume, remember the next row's number; ranks
    stay disjoint by taking different numbers.
    """

    def __init__(self, text, T, seed, place=(0, 0, 0)):
        self.text, self.T, self.seed = text if isinstance(text, Shards) else [text], T, seed
        self.lock = threading.Lock()   # the next batch is read in the background
        self.places = [tuple(place)]   # (epoch, shard, number of its first row) of what has been visited, in order
        if place[1] >= len(self.text):
            fail(f"the run stands in shard {place[1] + 1}, there are {len(self.text)}; give as many --shards as before, or more")
        self.enter(*place)

    def enter(self, epoch, shard, first):
        """Draw the order of a shard's rows, the first of which has number `first`."""
        corpus = self.text[shard]
        if len(corpus) < self.T:
            fail(f"text too short: {corpus.name} has {len(corpus)} bytes to train on, one row takes {self.T}; "
                 f"give more text" + (f" or --row_bytes {len(corpus)}" if len(corpus) > 1 else ""))
        rng = np.random.default_rng((self.seed, epoch, shard))
        if corpus.by_document(self.T):
            starts = corpus.row_starts(self.T)
            self.starts = starts[rng.permutation(len(starts))]
        else:
            n = max(1, len(corpus) // self.T - 1)                    # windows; one less leaves room to shift
            order = rng.permutation(n)
            self.starts = rng.integers(len(corpus) - n * self.T + 1) + order * self.T
        self.corpus, self.here, self.end = corpus, (epoch, shard, first), first + len(self.starts)

    def place(self, row):
        """The visited place that a row is in, or comes after; a Loader made with it need not go through those before."""
        return next(p for p in reversed(self.places) if p[2] <= row)

    def rows(self, first, count):
        """Rows first .. first+count-1, as Corpus.window."""
        parts = []
        with self.lock:
            while count:
                if self.place(first) != self.here:
                    self.enter(*self.place(first))
                while first >= self.end:
                    epoch, shard = divmod(self.here[0] * len(self.text) + self.here[1] + 1, len(self.text))
                    self.places.append((epoch, shard, self.end))
                    self.enter(*self.places[-1])
                part = self.starts[first - self.here[2]:][:count]
                parts.append(self.corpus.window(part, self.T))
                first, count = first + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else tuple(None if t[0] is None else torch.cat(t) for t in zip(*parts))


# ---------------------------------------------------------------------------------------------------------------------
# command line

def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.error = lambda message: fail(f"{message}; see python data.py --help")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name, text):
        c = commands.add_parser(name, help=text, allow_abbrev=False)
        c.error = parser.error
        return c

    c = command("fineweb", "fetch the validation shard and the first training shards")
    c.add_argument("--shards", type=int, default=1, help="how many to train on, 200 MB each")
    c.add_argument("--repo", default=REPO, help="the dataset on the hub")
    c.add_argument("--data_dir", default="data")
    c = command("check", "verify shards")
    c.add_argument("path", help="a shard or a folder of them")
    c = command("write", "make a shard from text")
    c.add_argument("text", help="a document a line, or, where there are blank lines, between these")
    c.add_argument("out", help="the shard to write")
    args = parser.parse_args(argv)
    if args.command == "fineweb":
        if args.shards < 0:
            fail(f"--shards {args.shards}: give 0 or more; 0 is the validation shard alone")
        folder = os.path.join(args.data_dir, args.repo.split("/")[-1])
        for number in range(args.shards + 1):
            print(fetch_shard(number, folder, args.repo))
    elif args.command == "check":
        paths = sorted(Path(args.path).glob("*.bin")) if os.path.isdir(args.path) else [Path(args.path)]
        if not os.path.exists(args.path):
            fail(f"no such file or folder: {args.path}; give a shard or a folder of them")
        if not paths:
            fail(f"no .bin file in {args.path}; give a shard or a folder of them")
        bad = 0
        for path in paths:
            try:
                print(f"{path}: good, {verify(path):,} ids")
            except (ValueError, OSError) as e:
                print(f"{path}: BAD, {e}")
                bad += 1
        if bad:
            fail(f"{bad} of {len(paths)} are not whole shards; remove them and fetch again")
    else:
        try:
            text = Path(args.text).read_bytes()
            docs = [d for d in re.split(rb"\n\s*\n" if re.search(rb"\n\s*\n", text.strip()) else rb"\n", text) if d.strip()]
            if not docs:
                fail(f"no text in {args.text}; give a file with a document a line, or between blank lines")
            print(f"{args.out}: {len(docs):,} documents, {write_shard(docs, args.out):,} ids")
        except OSError as e:
            fail(f"cannot read or write {e.filename}: {e.strerror}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130)

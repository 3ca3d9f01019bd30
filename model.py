"""
A byte-level language model that learns where its own tokens end, by reinforcement learning.
Implements "You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

Read from top to bottom; the file follows a byte from its embedding to the losses:

    x (B,T) bytes ──> encoder, sliding window ──> h (B,T,C) ──> early exit: log p_early(next byte)
                                                  │    │
                      policy: p = sigmoid(l), a ~ Bernoulli(p): "does a chunk end after this byte?"
                                                  │    │
        downsample: keep h where a = 1 (M,C) <────┘    │       the chunks of all rows, end to end
              │                                        │
        main transformer over M chunks ──> c (M,C)     │
              │                                        │
        upsample: every byte gets its last chunk ──> z = h + c ──> decoder ──> late head: log p(next byte)

The draw of `a` has no gradient. It is trained as an action instead (score function, REINFORCE): its reward is
how much better the late head predicts than the early exit, which never sees a boundary.

Symbols: B rows, T bytes, M chunks in all rows together, K chunks in the fullest row, C width, H heads, d head size; x bytes,
y targets, h and z byte states before and after the chunks, c chunk states; p probability of a boundary, l its logit,
a action (1 = boundary), u uniform noise; R reward, A advantage, gamma discount. Losses are nats, computed in fp32 from the
heads' logits (under bf16 autocast these carry a rounding of about 0.01 nats a byte).
"""
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SEPARATOR = 256   # starts every document and every row; text is bytes 0..255 and cannot contain it
VOCAB = 257
CHUNKERS = ["rl", "hnet", "pooling", "bpe", "space", "stride", "entropy", "random", "byte"]   # see Chunker
NO_TARGET = -1    # target of a position that predicts nothing: padding, or the byte before a separator


# ---------------------------------------------------------------------------------------------------------------------
# settings

@dataclass
class ModelConfig:
    """What the model and its losses are made of. train.py adds the run's settings and makes the command line."""
    chunker: str = "rl"           # what places boundaries: rl, hnet, pooling, bpe, space, stride, entropy, random or byte
    n_embd: int = 768             # C, width of every layer
    n_head: int = 12              # H, heads; the paper's head size is 64
    n_enc: int = 4                # byte layers before the boundaries
    n_main: int = 12              # layers that see only chunks
    n_dec: int = 4                # byte layers after them
    window: int = 64              # bytes that a byte layer sees, the current one included
    rate: float = 0.2             # target share of bytes that end a chunk
    policy_window: int = 1        # w: 1 = boundaries independent given the bytes; w > 1 sees w-1 actions; paper: 8
    gate_scale: float = 1.0       # s in the boundary logit; paper: 1/16
    gamma: float = 0.99           # discount of later rewards; 1 = none
    lambda_pi: float = 0.03       # weight of the score-function loss; paper: 0.01
    lambda_target: float = 0.03   # weight of the loss that holds the rate at its target; paper: 0.01
    lambda_early: float = 0.1     # share of the early exit in the likelihood loss
    lambda_ratio: float = 0.03    # weight of hnet's ratio loss
    lambda_prior: float = 1.0     # weight of pooling's binomial prior
    early_relative: bool = True   # reward relative to the early exit's log-likelihood
    batch_relative: bool = True   # reward relative to its mean over the batch at the same position


# ---------------------------------------------------------------------------------------------------------------------
# norm, rotary embedding, attention, MLP, block

class RMSNorm(torch.autograd.Function):
    """y = x / (rms(x) + 1e-6) over the last axis; backward takes the 1e-6 for 0. By hand, because eager autograd through
    F.rms_norm is some four times slower on a CPU, and there are five of these in every block."""

    @staticmethod
    def forward(ctx, x, dtype):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32) * x.size(-1) ** -0.5   # (..., 1)
        r = (r + 1e-6).reciprocal()
        y = (x * r).to(dtype)
        ctx.save_for_backward(y, r)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, grad):
        y, r = ctx.saved_tensors
        return (torch.addcmul(grad, y, (grad * y).mean(-1, keepdim=True), value=-1) * r).to(ctx.dtype), None


def norm(x, dtype=None):
    """Root-mean-square norm without a gain, by default in the dtype of matrix products."""
    if dtype is None:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return RMSNorm.apply(x, dtype)


def rotary_table(t, d):
    """Positions t (N,) -> (N, d/2, 2), cos and sin of t * 10000^(-2k/d), in fp32: bf16 would blur the angles."""
    freq = 10000.0 ** (-torch.arange(0, d, 2, device=t.device, dtype=torch.float32) / d)
    angle = torch.outer(t.float(), freq)
    return torch.stack([angle.cos(), angle.sin()], -1)


def rotate(x, rope):
    """Rotary embedding: pairs of features turn with position. x (...,H,d) fp32, rope (...,d/2,2) -> (...,H,d)."""
    pairs, rope = x.unflatten(-1, (-1, 2)), rope.unsqueeze(-3)                        # (..., H, d/2, 2), (..., 1, d/2, 2)
    if not torch.compiler.is_compiling():   # complex products: three times faster than what follows, unless that is fused
        return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(rope)).flatten(-2)
    (a, b), (cos, sin) = pairs.unbind(-1), rope.unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)        # (..., H, d)


def window_mask(B, T, window, device):
    """Who sees whom in the folded blocks of window_attention: (B*n, 1, W, 2W) bool, W = window, n = ceil(T/W) blocks."""
    n = -(-T // window)
    i = torch.arange(window, 2 * window, device=device)[:, None]   # query, counted from the start of the previous block
    j = torch.arange(2 * window, device=device)                    # key, previous block first
    mask = ((j <= i) & (j > i - window)).repeat(n, 1, 1)           # (n, W, 2W)
    mask[0, :, :window] = False                                    # the first block has no previous one
    return mask.repeat(B, 1, 1).unsqueeze(1)                       # (B*n, 1, W, 2W)


def window_attention(q, k, v, mask):
    """Causal attention to the last W positions, the own included, at a cost of O(T * W), never T * T.

    q, k, v (B,T,H,d), mask from window_mask for at least B rows -> (B,T,H,d). The row is cut into blocks of W bytes, which
    fold into the batch; each block attends to itself and the one before, which hold every key in reach:

        block          0      1      2
        queries      [abc]  [def]  [ghi]
        keys      [...abc][abcdef][defghi]
    """
    B, T, H, d = q.shape
    W = mask.size(2)
    n = -(-T // W)

    def fold(x, with_previous):
        x = F.pad(x, (0, 0, 0, 0, 0, n * W - T)) if n * W > T else x
        x = x.view(B, n, W, H, d)                 # (B, n, W, H, d)
        if with_previous:
            x = torch.cat([x.roll(1, 1), x], 2)   # (B, n, 2W, H, d); block 0 gets the last one, which the mask hides
        return x.flatten(0, 1).transpose(1, 2)    # (B*n, H, W or 2W, d)

    y = scaled_dot_product(fold(q, False), fold(k, True), fold(v, True), mask[:B * n])   # (B*n, H, W, d)
    return y.transpose(1, 2).reshape(B, n * W, H, d)[:, :T]                              # (B, T, H, d)


def scaled_dot_product(q, k, v, mask=None):
    """Attention of q (B,H,Tq,d) to k, v (B,H,Tk,d) where mask allows it, causal without a mask -> (B,H,Tq,d)."""
    if q.device.type == "cpu":   # fp32: the backward pass of the CPU's bf16 kernel is several times slower
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, is_causal=mask is None)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


class Attention(nn.Module):
    """Over bytes, x (B,T,C) -> (B,T,C), within the window of mask (from window_mask; None = all before). Over chunks,
    x (M,C) -> (M,C), causal within each row: only here are rows padded, to K chunks. With a cache, over one new position of
    each row, x (B,1,C) -> (B,1,C)."""

    def __init__(self, cfg):
        super().__init__()
        self.n_head = cfg.n_head
        self.qk = nn.Linear(cfg.n_embd, 2 * cfg.n_embd, bias=False)
        self.v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x, rope, mask=None, chunks=None, cache=None):
        # differs from the paper: queries and keys are normed, so scores stay within +-sqrt(d) at any learning rate
        qk = norm(self.qk(x).unflatten(-1, (2 * self.n_head, -1)), torch.float32)    # (..., 2H, d)
        v = self.v(x).unflatten(-1, (self.n_head, -1))                               # (..., H, d)
        qk = rotate(qk, rope).to(v.dtype)
        if chunks:
            qk, v = take(qk, chunks.slots), take(v, chunks.slots)                    # (B, K, 2H, d), (B, K, H, d)
        q, k = qk.unflatten(2, (2, -1)).unbind(2)                                    # (B, N, H, d) each, N = T, K or 1
        if cache:
            y = cache(q, k, v)
        elif mask is not None:
            y = window_attention(q, k, v, mask)
        else:
            y = scaled_dot_product(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        y = y.flatten(2)                                                             # (B, N, C)
        return self.out(take(y.flatten(0, 1), chunks.home) if chunks else y)         # (M, C) or (B, T, C)


class MLP(nn.Module):
    """Gated MLP of three matrices."""

    def __init__(self, n, hidden):
        super().__init__()
        self.gate = nn.Linear(n, hidden, bias=False)
        self.up = nn.Linear(n, hidden, bias=False)
        self.down = nn.Linear(hidden, n, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Attention and MLP, each with a norm before and after (paper, appendix); those after have a gain a channel."""

    def __init__(self, cfg, hidden):
        super().__init__()
        self.attn, self.attn_gain = Attention(cfg), nn.Parameter(torch.ones(cfg.n_embd))
        self.mlp, self.mlp_gain = MLP(cfg.n_embd, hidden), nn.Parameter(torch.ones(cfg.n_embd))

    def forward(self, x, *where):
        x = torch.addcmul(x, norm(self.attn(norm(x), *where), x.dtype), self.attn_gain)
        return torch.addcmul(x, norm(self.mlp(norm(x)), x.dtype), self.mlp_gain)


class Transformer(nn.Module):
    """A stack of blocks over bytes (B,T,C) or chunks (M,C); arguments as Attention's, but a cache a layer. The hidden width
    of the MLPs is mlp_ratio * C; 1 in byte layers and 4 in main layers, as in the paper."""

    def __init__(self, cfg, n_layer, mlp_ratio):
        super().__init__()
        self.blocks = nn.ModuleList(Block(cfg, mlp_ratio * cfg.n_embd) for _ in range(n_layer))

    def forward(self, x, rope, mask=None, chunks=None, caches=None):
        for k, block in enumerate(self.blocks):
            x = block(x, rope, mask, chunks, caches and caches[k])
        return x


# ---------------------------------------------------------------------------------------------------------------------
# the chunker: where does a chunk end, what goes in, where does it come out, and what trains that?

class Chunker(nn.Module):
    """The steps of every chunker, with what most of them share. They differ so (boundary m is at byte end_m):

                  features, sample: a_i = 1 where    pool: chunk m is    spread: byte i gets   soft, loss: trained by
        rl        u <= p, p from h_i                 h at end_m          chunk of_i            score function
        hnet      p >= 1/2, p from h_{i-1}, h_i      h at end_m          smoothed chunk of_i   straight-through, ratio loss
        pooling   relaxed Bernoulli of h_i > 1/2     mean h up to end_m  chunk of_i            straight-through, binomial prior
        entropy   the early exit is unsure of byte   h at end_m          chunk of_i            nothing; a threshold follows
                  i+1
        space, stride, random, byte, bpe: a rule     h at end_m          chunk of_i            nothing

    A boundary at i reads bytes up to i only, so that byte i itself may already use its chunk; bpe alone looks ahead.
    """

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.by_chance = cfg.chunker in ("random", "pooling")   # drawn in evaluation too, as their authors do

    def init_weights(self):
        pass

    def features(self, h, x, early_logits, token_start, first=0):
        """What decides: normed h (B,T,C), x (B,T), early_logits (B,T,257), token_start (B,T) bool or None, and the position of
        the first byte -> v (B,T,...)."""
        raise NotImplementedError

    def sample(self, v, u):
        """v, and u (B,T) uniforms in [0,1) -> a (B,T) bool, a_0 = 1 always. u None: no chance, or by_chance the noise that
        fixed_noise gives each position."""
        raise NotImplementedError

    def soft(self, v, a, u):
        """p (B,T) fp32 in 0..1, the boundary's probability or what stands for it; straight-through gradients enter here."""
        return a.float()

    def pool(self, h, p, a, chunks):
        """h (B,T,C), p from soft, a (B,T), chunks from chunk_index -> what the main transformer reads (M,C)."""
        return take(h.flatten(0, 1), chunks.end)

    def spread(self, c, p, a, chunks):
        """c (M,C) from the main transformer -> what is added to h (B,T,C)."""
        return take(c, chunks.of)

    def decide(self, v, actions, t):
        """One byte at a time: the last two bytes' v (B,2,...), the w-1 actions before byte t (B,w-1) -> a_t (B,) bool."""
        return self.sample(v, None)[:, 1]

    def pool_step(self, h, a, s):
        """pool, one byte at a time: h (B,C), a (B,) -> (B,C), of which rows with a are read. s: a Stream for its state."""
        return h

    def spread_step(self, c, p, a, s):
        """spread, one byte at a time: c (B,C), the last chunk's, p and a (B,) -> (B,C)."""
        return c

    def loss(self, v, a, p, late, early, real, free, pairs):
        """Weighted loss (), and stats. late, early (B,T) nats, detached; real (B,T): the byte has a target; free (B,T): the
        action was a choice and is followed by a target."""
        return 0.0, {}


CAP = 6.0   # soft cap of the boundary logit: p stays within 0.0025 .. 0.9975, so no action becomes impossible


class Policy(Chunker):
    """`rl`. With h_i normed, L a linear map to w numbers, and a the actions so far (paper, section 3):

        v_i = L h_i,    l_i = cap(s * (v_i[0] + sum_{k=1}^{w-1} v_i[k] * a_{i-k}) + logit(rate)),    p_i = sigmoid(l_i)

    differs from the paper: h_i is normed first, and the cap is the same in training and in evaluation.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.logit_rate = math.log(cfg.rate / (1 - cfg.rate))
        self.linear = nn.Linear(cfg.n_embd, cfg.policy_window)

    def init_weights(self):
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def features(self, h, x=None, early_logits=None, token_start=None, first=0):
        """Normed h (B,T,C) -> scaled v (B,T,w) in fp32."""
        with torch.autocast(h.device.type, enabled=False):
            return self.cfg.gate_scale * self.linear(h.float())

    def logits(self, v, a):
        """v (B,T,w) and actions a (B,T) -> capped logits l (B,T), all positions at once."""
        l, a = v[..., 0], a.to(v.dtype)
        for k in range(1, v.size(-1)):
            l = l + v[..., k] * F.pad(a, (k, 0))[:, :a.size(1)]   # a_{i-k}, 0 before the row
        return CAP * torch.tanh((l + self.logit_rate) / CAP)

    @torch.no_grad()
    def sample(self, v, u):
        """Draw every action of a row: a_i = 1 where u_i <= p_i, and a_0 = 1 always.

        v (B,T,w) features, u (B,T) uniforms in [0,1) -> a (B,T) bool. u None is u = 1/2 everywhere: the greedy p >= 1/2.
        u_i enters at byte i only, so that a prefix, or a row alone, draws the same actions as the whole batch.
        """
        u = v.new_full(v.shape[:2], 0.5) if u is None else u
        # u <= sigmoid(CAP * tanh(l/CAP)) is solved for l, once a byte instead of once a state
        threshold = CAP * torch.atanh((torch.logit(u) / CAP).clamp(-1, 1)) - self.logit_rate   # (B, T), may be infinite
        if v.size(-1) == 1:
            a = v[..., 0] >= threshold
        else:
            a = sample_scan(v, threshold)
        a[:, 0] = True
        return a

    def soft(self, v, a, u):
        return torch.sigmoid(self.logits(v, a))

    def decide(self, v, actions, t):
        a = F.pad(actions, (0, 1))                                                      # (B, w), byte t itself last
        return self.logits(v[:, 1:].expand(-1, a.size(1), -1), a)[:, -1] >= 0

    def loss(self, v, a, p, late, early, real, free, pairs):
        """The discounted score-function loss, and what holds the rate (paper, section 3)."""
        cfg = self.cfg
        l = self.logits(v, a)                                                           # (B, T)
        log_pi = F.logsigmoid(torch.where(a, l, -l))                                    # (B, T) log-probability of a
        n_free = count(free)
        l_target = (l * free).sum() / n_free * (batch_mean(p, free) - cfg.rate)
        n = 2 * pairs or len(a)   # rows that are judged: where there are twins, they alone; the others would only add noise
        with torch.no_grad():     # the reward is a number: no gradient reaches the heads through it
            R = -late + early if cfg.early_relative else -late                          # (B, T)
            A = discounted_sum(centre(R[:n], real[:n], pairs, cfg.batch_relative), cfg.gamma)               # (n, T)
            entropy = -(p * F.logsigmoid(l) + (1 - p) * F.logsigmoid(-l))
            stats = dict(entropy=(entropy * free).sum() / n_free,
                         advantage_sq=(A ** 2 * free[:n]).sum() / count(free[:n]))
        l_pi = -(A * log_pi[:n] * free[:n]).sum() / count(real[:n])
        return cfg.lambda_pi * l_pi + cfg.lambda_target * l_target, stats


def sample_scan(v, threshold, piece=512):
    """Sample where each action depends on the w-1 before it. v (B,T,w), threshold (B,T) -> a (B,T) bool.

    State s = the last w-1 actions as bits, the newest lowest. With its noise fixed, byte i is a function from the state
    before it to the state after it, a table of S = 2^(w-1) entries, and functions compose associatively:

        up    f_0   f_1   f_2   f_3        compose neighbours, then pairs of neighbours, ...
                f_01        f_23
        down  state before f_0 is known -> before f_23 -> before f_1, f_3      one look-up each

    About 2 * log2(piece) * T/piece steps instead of T; the tables of a piece (a power of two) stay in cache.
    """
    B, T, w = v.shape
    S = 2 ** (w - 1)
    s = torch.arange(S, device=v.device)
    bits = (s >> torch.arange(w - 1, device=v.device).unsqueeze(1)) & 1        # (w-1, S): bit k-1 of s is a_{i-k}
    bits = torch.cat([torch.ones_like(bits[:1]), bits]).float()                # (w, S), so that v @ bits = l in every state
    state = torch.zeros(B, 1, dtype=torch.long, device=v.device)               # before the row: no boundary
    actions = []
    for i in range(0, T, piece):
        with torch.autocast(v.device.type, enabled=False):
            l = v[:, i:i + piece] @ bits                                       # (B, n, S), n bytes in this piece
        a = l >= threshold[:, i:i + piece].unsqueeze(-1)                       # (B, n, S) the action in every state
        if i == 0:
            a[:, 0] = True                                                     # forced; later states contain it
        n = a.size(1)
        a = F.pad(a, (0, 0, 0, 2 ** (n - 1).bit_length() - n))                 # (B, N, S), N a power of two
        f = (s << 1 & S - 1) + a                                               # (B, N, S) the state after each byte
        levels = [f]
        while f.size(1) > 1:
            f = f[:, 1::2].gather(2, f[:, 0::2])                               # second after first: half as many
            levels.append(f)
        before, state = state, f.gather(2, state.unsqueeze(-1)).squeeze(-1)    # (B, 1) each: of and behind the piece
        for f in reversed(levels[:-1]):
            after = f[:, 0::2].gather(2, before.unsqueeze(-1)).squeeze(-1)     # behind each first half
            before = torch.stack([before, after], 2).flatten(1)                # twice as many
        actions.append(a.gather(2, before.unsqueeze(-1)).squeeze(-1)[:, :n])
    return torch.cat(actions, 1)                                               # (B, T)


# ---------------------------------------------------------------------------------------------------------------------
# between bytes and chunks

class Chunks(NamedTuple):
    """Where the chunks of a batch are; M of them, the rows' laid end to end, and K in the fullest row."""
    end: torch.Tensor     # (M,) the byte of its boundary, counted through the batch: row * T + i
    of: torch.Tensor      # (B,T) the chunk that a byte gets: the last that ends at or before it
    slots: torch.Tensor   # (B,K) the chunks of each row, for attention
    home: torch.Tensor    # (M,) where in slots each chunk is, row * K + k


def chunk_index(a):
    """Actions a (B,T) bool with a[:,0] = 1 (a row without would get the chunks of the one before) -> Chunks.

        byte of row 0  0  1  2  3  4  5  6     of row 1  7  8  9 10 11 12 13
        a              1  0  0  1  0  1  0               1  0  1  0  0  0  0
        of             0  0  0  1  1  2  2               3  3  4  4  4  4  4
        end            0  3  5  7  9                     slots  [0 1 2] [3 4 *]      home  0 1 2 3 4

    M and K are rounded up, so that few shapes occur. Nothing reads the spare chunks (which end at byte 0) or what spare
    slots (*) make of the neighbour's chunk they hold: they come last, and attention is causal.
    """
    B, T = a.shape
    counts = a.sum(1)                                                      # (B,)
    M, K = torch.stack([counts.sum(), counts.max()]).tolist()              # the one host sync of a pass
    M, K = -(-M // 32) * 32, -(-K // 8) * 8
    of = a.flatten().cumsum(0) - 1                                         # (B*T,)
    first = of[::T]                                                        # (B,) of each row
    i = torch.arange(B * T, device=a.device)
    end = of.new_zeros(M + 1)                                              # and one place for all that is no boundary
    end = end.scatter_(0, torch.where(a.flatten(), of, M), i)[:M]          # (M,)
    slots = first[:, None] + torch.arange(K, device=a.device)              # (B, K)
    row = end // T                                                         # (M,)
    return Chunks(end, of.view(B, T), slots.clamp(max=M - 1), row * K + of[end] - first[row])


def take(x, index):
    """x[index]: rows of x (N,C) or (N,...), by an index of any shape, which takes the place of N. Of the ways to gather rows,
    index_select has the fastest backward pass on a CPU."""
    return x.index_select(0, index.flatten()).unflatten(0, index.shape)


# ---------------------------------------------------------------------------------------------------------------------
# likelihoods, sums over ranks, rewards and advantages

class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[y] in fp32, in pieces, so that no whole fp32 copy of the logits ever exists; backward keeps
    only the logits as they came. Eager autograd would hold three copies, at three times the time on a CPU."""

    @staticmethod
    def forward(ctx, logits, y):                                                        # (N, 257), (N,) with N = B*T
        piece = 1024 if logits.device.type == "cpu" else 65536                          # fits a core's cache
        lse = torch.cat([z.float().logsumexp(-1) for z in logits.split(piece)])         # (N,)
        chosen = logits.gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1).float()       # (N,)
        ctx.save_for_backward(logits, y, lse)
        ctx.piece = piece
        return torch.where(y == NO_TARGET, 0.0, lse - chosen)                           # (N,)

    @staticmethod
    def backward(ctx, grad):                                        # d nll / d logits = softmax - onehot(y)
        logits, y, lse = ctx.saved_tensors
        grad = torch.where(y == NO_TARGET, 0.0, grad)
        out = torch.empty_like(logits)
        whole = out, logits, y.clamp(min=0).unsqueeze(1), lse.unsqueeze(1), grad.unsqueeze(1)
        for o, z, target, z_lse, weight in zip(*(t.split(ctx.piece) for t in whole)):
            softmax = (z.float() - z_lse).exp_()                                        # (piece, 257)
            o.copy_(softmax.scatter_add_(1, target, -torch.ones_like(weight)).mul_(weight))
        return out, None


def nll(logits, y):
    """Negative log-likelihood in nats, fp32: logits (B,T,257), y (B,T) -> (B,T), 0 where y is NO_TARGET."""
    return CrossEntropy.apply(logits.flatten(0, -2), y.flatten()).view(y.shape)


def world_size():
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def all_sum(x):
    """Sum x over ranks, in place and without gradient; returns x."""
    if world_size() > 1:
        dist.all_reduce(x)
    return x


def count(mask):
    """Entries of mask (B,T) that are set on all ranks, as one rank's share: DDP averages over ranks what is divided by it."""
    return (all_sum(mask.sum().float()) / world_size()).clamp(min=1e-9)


@torch.no_grad()
def batch_mean(x, mask):
    """Mean of x (B,T) over mask (B,T) on all ranks, a number without gradient."""
    return all_sum((x * mask).sum().float()) / world_size() / count(mask)


def discounted_sum(R, gamma):
    """A_i = sum_{j >= i} gamma^(j-i) R_j, R (B,T) -> A (B,T), in log2(T) doublings: A covers the next s rewards."""
    A, s = R, 1
    while s < R.size(1):
        A = torch.cat([A[:, :-s] + gamma ** s * A[:, s:], A[:, -s:]], 1)   # (B, T)
        s *= 2
    return A


def centre(R, real, pairs, batch_relative):
    """Subtract from R (N,T) what the boundaries did not cause; entries where real is False are 0 before and after.

    With pairs, N = 2 * pairs, and rows r and r + pairs are twins: the same text with independently sampled boundaries, each
    centred on the mean of the two. Without, batch_relative centres on the batch mean at the same position, over real
    targets only and over all ranks. A mean contains the row's own reward, which scales the expected gradient by
    1 - 1/count: by one half for twins, and nothing is left where only one row has a target.
    """
    if pairs:
        R = R - R.view(2, pairs, R.size(1)).mean(0).repeat(2, 1)                              # (N, T)
    elif batch_relative:
        total, number = all_sum(torch.stack([R.sum(0), real.sum(0).float()]))                 # (T,) each
        R = R - total / number.clamp(min=1)
    return R * real


# ---------------------------------------------------------------------------------------------------------------------
# the model

class ByteLM(nn.Module):
    """The whole model; `forward` is the picture at the top of this file."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(VOCAB, cfg.n_embd)
        self.encoder = Transformer(cfg, cfg.n_enc, 1)
        self.early_head = nn.Linear(cfg.n_embd, VOCAB, bias=False)
        self.chunker = dict(rl=Policy, hnet=HNet, pooling=Pooling).get(cfg.chunker, Rule)(cfg)
        self.main = Transformer(cfg, cfg.n_main, 4)
        self.decoder = Transformer(cfg, cfg.n_dec, 1)
        self.late_head = nn.Linear(cfg.n_embd, VOCAB, bias=False)
        self.init_weights()

    def init_weights(self):
        """Embedding N(0,1); linear maps N(0, 1/(3*fan_in)); heads a third of that deviation, so that the first loss is
        near ln 257; chunkers as they say; rl's policy 0, so that every first p is sigmoid(cap(logit(rate))): 0.204 at 0.2."""
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=(3 * m.in_features) ** -0.5)
        for head in (self.early_head, self.late_head):
            nn.init.normal_(head.weight, std=(3 * head.in_features) ** -0.5 / 3)
        self.chunker.init_weights()

    def forward(self, x, y=None, u=None, pairs=0, token_start=None):
        """One pass over rows of bytes; with targets also the losses.

        x      (B-pairs, T) ids 0..256, each row starting with SEPARATOR
        y      (B-pairs, T) the next byte of each position, NO_TARGET where there is none; or None
        u      (B, T) uniforms in [0,1) that decide the boundaries; None = without chance (greedy, p >= 1/2), for evaluation
        pairs  the first `pairs` rows of x run twice, with boundaries of their own (twins, see `centre`), and they alone
               train the policy
        token_start  (B-pairs, T) bool, for the chunker `bpe` only

        Returns a dict: logits, early_logits (B,T,257), v (B,T,...), p (B,T), a (B,T) bool; with y also loss () and stats,
        a dict of detached scalars.
        """
        T, W, d = x.size(1), self.cfg.window, self.cfg.n_embd // self.cfg.n_head
        rope = rotary_table(torch.arange(T, device=x.device), d).unsqueeze(0)           # (1, T, d/2, 2)
        mask = window_mask(x.size(0) + pairs, T, W, x.device) if W < T else None
        h = self.encoder(self.embed(x), rope, mask)                                     # (B-pairs, T, C)
        normed = norm(h)                                                                # (B-pairs, T, C)
        early_logits = self.early_head(normed)                                          # (B-pairs, T, 257)

        v = self.chunker.features(normed, x, early_logits, token_start)                 # (B-pairs, T, ...)
        if pairs:   # twins share everything up to here
            twice = lambda t: None if t is None else torch.cat([t[:pairs], t])
            h, early_logits, v, y = twice(h), twice(early_logits), twice(v), twice(y)   # (B, T, ...)
        a = self.chunker.sample(v, u)                                                   # (B, T)
        p = self.chunker.soft(v, a, u)                                                  # (B, T)

        chunks = chunk_index(a)
        c = self.chunker.pool(h, p, a, chunks)                                          # (M, C)
        c = self.main(c, rope[0, chunks.end % T], chunks=chunks)                        # (M, C)
        z = self.decoder(h + self.chunker.spread(c, p, a, chunks), rope, mask)          # (B, T, C)
        logits = self.late_head(norm(z))                                                # (B, T, 257)
        out = dict(logits=logits, early_logits=early_logits, v=v, p=p, a=a)
        if y is not None:
            out["loss"], out["stats"] = self.losses(out, y, pairs)
        return out

    def losses(self, out, y, pairs):
        """All losses (paper, section 3): out of forward, y (B,T) -> loss (), stats.

        Losses are means over the real targets of this forward pass on all ranks. A stat's mean over ranks is its value:
        late, early and entropy in nats, rate a share, advantage_sq the mean square of A.
        """
        cfg, a = self.cfg, out["a"]
        late, early = nll(out["logits"], y), nll(out["early_logits"], y)                # (B, T) nats, 0 where no target
        real = y != NO_TARGET
        free = real.flip(1).cumsum(1).flip(1) > 0      # actions with a reward still to come ...
        free[:, 0] = False                             # ... and not the forced first one
        n = count(real)
        l_auto, l_early = late.sum() / n, early.sum() / n
        l_chunker, stats = self.chunker.loss(out["v"], a, out["p"], late.detach(), early.detach(), real, free, pairs)
        # differs from the paper's formula, L_auto + 0.1 L_early; its authors' code mixes 0.9 / 0.1, as here
        loss = (1 - cfg.lambda_early) * l_auto + cfg.lambda_early * l_early + l_chunker
        stats = dict(late=l_auto, early=l_early, rate=(a & free).sum() / count(free)) | stats
        return loss, {k: s.detach() for k, s in stats.items()}

    @torch.no_grad()
    def step(self, x, s):
        """One byte more of every row of a Stream s: x (B,) ids -> logits (B,257), as the last of forward over all bytes so far.

        Byte layers cost the same for every byte; the main transformer takes a step only in rows that place a boundary.
        """
        d = self.cfg.n_embd // self.cfg.n_head
        rope = rotary_table(torch.tensor([s.t], device=x.device), d).unsqueeze(0)       # (1, 1, d/2, 2)
        s.byte_layers()
        h = self.encoder(self.embed(x).unsqueeze(1), rope, caches=s.encoder)            # (B, 1, C)
        s.h, s.x = torch.cat([s.h[:, 1:], h], 1), torch.stack([s.x[:, 1], x], 1)        # (B, 2, C), (B, 2): the last two
        normed = norm(s.h)
        v = self.chunker.features(normed, s.x, self.early_head(normed), None, s.t - 1)  # (B, 2, ...)
        a = self.chunker.decide(v, s.actions, s.t) | (s.t == 0)                         # (B,)
        if self.cfg.policy_window > 1:
            s.actions = torch.cat([s.actions[:, 1:], a.unsqueeze(1)], 1)
        pooled = self.chunker.pool_step(h.squeeze(1), a, s)                             # (B, C)
        rows, s.a = a.nonzero().squeeze(1), a
        if len(rows):
            s.main_layers(rows)
            s.c[rows] = self.main(pooled[rows].unsqueeze(1), rope, caches=s.main).squeeze(1)
        # p is v for hnet, the one that asks
        z = h + self.chunker.spread_step(s.c, v[:, 1] if s.t else torch.ones_like(a, dtype=h.dtype), a, s).unsqueeze(1)
        s.t += 1
        return self.late_head(norm(self.decoder(z, rope, caches=s.decoder))).squeeze(1)

    def generate(self, prompts, n, row_bytes, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Continue every prompt (bytes, may be empty) by n bytes. Yields, byte by byte, a list with for each prompt an int and
        whether a chunk ended just before it, or None while a longer prompt is read or when the row has its n bytes.
        Boundaries are those of evaluation. temperature, top_k, top_p and generator (a CPU torch.Generator) as in sample_byte.

        A row that reaches row_bytes, the length in training, starts anew with its own last half.
        """
        rows, device = [bytearray(p) for p in prompts], self.embed.weight.device
        goal = [len(p) + n for p in prompts]
        begin = [max(0, len(r) - row_bytes // 2) for r in rows]                         # of the text that the stream holds
        while any(len(r) < g for r, g in zip(rows, goal)):
            s, x = Stream(self, len(rows)), torch.full((len(rows),), SEPARATOR, device=device)
            for t in range(row_bytes):
                byte = sample_byte(self.step(x, s), temperature, top_k, top_p, generator).tolist()
                at = [b + t for b in begin]                                             # where these bytes would go
                new = [i == len(r) < g for i, r, g in zip(at, rows, goal)]
                for r, b, fresh in zip(rows, byte, new):
                    if fresh:
                        r.append(b)
                if any(new):
                    yield [(b, ended) if fresh else None for b, ended, fresh in zip(byte, s.a.tolist(), new)]
                if all(len(r) >= g for r, g in zip(rows, goal)):
                    return
                x = torch.tensor([r[i] if i < len(r) else SEPARATOR for i, r in zip(at, rows)], device=device)
            begin = [b + row_bytes - row_bytes // 2 for b in begin]


class Stream:
    """What ByteLM.step remembers of B rows: keys and values of every layer, and the chunker's state."""

    def __init__(self, model, B):
        cfg, weight = model.cfg, model.embed.weight
        self.t = 0
        zeros = lambda *shape: torch.zeros(B, *shape, device=weight.device, dtype=weight.dtype)
        self.encoder, self.decoder, self.main = ([Cache(zeros, cfg) for _ in part.blocks]
                                                 for part in (model.encoder, model.decoder, model.main))
        self.window, self.chunks = cfg.window, torch.zeros(B, dtype=torch.long, device=weight.device)   # chunks so far
        self.h, self.c, self.sum, self.smoothed = zeros(2, cfg.n_embd), zeros(cfg.n_embd), zeros(cfg.n_embd), zeros(cfg.n_embd)
        self.x, self.bytes = torch.full((B, 2), SEPARATOR, device=weight.device), zeros(1)
        self.actions = zeros(cfg.policy_window - 1)

    def byte_layers(self):
        """Byte t goes to slot t % window, over the byte that leaves the window."""
        visible = torch.ones(1, min(self.t + 1, self.window), dtype=torch.bool, device=self.x.device)
        for cache in self.encoder + self.decoder:
            cache.aim(slice(None), self.t % self.window, visible)

    def main_layers(self, rows):
        """The next chunk of these rows goes behind the ones they have."""
        slot = self.chunks[rows]
        visible = torch.arange(int(slot.max()) + 1, device=slot.device) <= slot[:, None]    # once for all layers: it waits
        for cache in self.main:
            cache.aim(rows, slot, visible)
        self.chunks[rows] += 1


class Cache:
    """Keys and values (B,S,H,d) of one layer. aim says where the next go and which slots they may see; a call stores them."""

    def __init__(self, zeros, cfg):
        self.k, self.v = (zeros(16, cfg.n_head, cfg.n_embd // cfg.n_head) for _ in "kv")

    def aim(self, rows, slot, visible):
        self.rows, self.slot, self.visible = rows, slot, visible
        while visible.size(1) > self.k.size(1):                                         # twice the room
            self.k, self.v = (torch.cat([t, torch.zeros_like(t)], 1) for t in (self.k, self.v))

    def __call__(self, q, k, v):
        """q, k, v (R,1,H,d) of the rows aimed at -> (R,1,H,d)."""
        self.k[self.rows, self.slot], self.v[self.rows, self.slot] = k.squeeze(1).to(self.k.dtype), v.squeeze(1).to(self.v.dtype)
        k, v = (t[self.rows, :self.visible.size(1)].transpose(1, 2) for t in (self.k, self.v))   # (R, H, S, d)
        return scaled_dot_product(q.transpose(1, 2), k, v, self.visible[:, None, None]).transpose(1, 2)


def sample_byte(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw the next byte from logits (B,257), never SEPARATOR -> (B,) ids 0..255 on the CPU.

    temperature 0 takes the likeliest; top_k (0 = all) keeps the k likeliest; top_p keeps the fewest that hold that share
    (before top_k cuts).
    """
    logits = logits[:, :SEPARATOR].float().cpu()                                        # (B, 256)
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = logits.sort(-1, descending=True)
    probs = ((logits - logits[:, :1]) / temperature).softmax(-1)                        # the largest at 0: no overflow
    probs[probs.cumsum(-1) - probs > top_p] = 0                                         # the likeliest always stays
    if top_k:
        probs[:, top_k:] = 0
    return order.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)


# ---------------------------------------------------------------------------------------------------------------------
# the other chunkers

def fixed_noise(T, device):
    """(T,) uniforms for evaluation, always the same; a shorter row gets the start of a longer one's."""
    return torch.rand(T, generator=torch.Generator().manual_seed(0)).to(device)


class Rule(Chunker):
    """Boundaries without parameters."""

    def __init__(self, cfg):
        super().__init__(cfg)
        word = [b < 128 and chr(b).isalnum() or 0x80 <= b < 0xC0 for b in range(VOCAB)]
        self.register_buffer("word", torch.tensor(word), persistent=False)
        if cfg.chunker == "entropy":
            self.register_buffer("threshold", torch.tensor(math.log(VOCAB)))   # nats; where an untrained head stands

    def features(self, h, x, early_logits, token_start, first=0):
        i = (first + torch.arange(x.size(1), device=x.device)).expand_as(x)    # (B, T)
        match self.cfg.chunker:
            case "byte":      # no compression: what chunks could cost at most
                return torch.ones_like(x, dtype=torch.bool)
            case "stride":    # every k-th byte (MegaByte, arXiv 2305.07185; Hourglass)
                return i % round(1 / self.cfg.rate) == 0
            case "random":    # decided by noise alone
                return i
            case "space":     # SpaceByte (arXiv 2404.14408): no letter, digit or UTF-8 continuation, and follows one
                word = self.word[x]
                return ~word & F.pad(word, (1, 0))[:, :-1] | (x == SEPARATOR)
            case "bpe":       # the first byte of each GPT-2 token, found by reading ahead: guidance, not a causal policy
                return token_start
            case "entropy":   # Byte Latent Transformer (arXiv 2412.09871); differs: theirs come from a model of their own
                log_p = early_logits.detach().float().log_softmax(-1)
                return -(log_p.exp() * log_p).sum(-1)                          # (B, T) nats

    @torch.no_grad()
    def sample(self, v, u):
        B, T = v.shape
        match self.cfg.chunker:
            case "random" if u is None:   # v holds positions
                a = fixed_noise(int(v.max()) + 1, v.device)[v] < self.cfg.rate
            case "random":                # exactly round(rate * T) a row, the forced one among them
                rank = F.pad(u[:, 1:], (1, 0), value=-1).argsort(1).argsort(1)
                a = rank < round(self.cfg.rate * T)
            case "entropy":
                a = v > self.threshold
            case _:
                a = v
        a = a.clone()
        a[:, 0] = True
        return a

    def loss(self, v, a, p, late, early, real, free, pairs):
        if self.cfg.chunker == "entropy" and self.training:   # a running quantile, the mean of the ranks'
            quantile = v.float().quantile(1 - self.cfg.rate)
            quantile = all_sum(quantile) / world_size()
            self.threshold.lerp_(torch.where(quantile.isfinite(), quantile, self.threshold), 0.3)
        return 0.0, {}


class HNet(Chunker):
    """H-Net's routing (Hwang et al. 2025, arXiv 2507.07955): a boundary where neighbours differ. As in their code a boundary
    *opens* a chunk, which holds the h it opens with. Differs: h is added as it is, not through a map that starts at 0."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.q = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.k = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def init_weights(self):
        nn.init.eye_(self.q.weight)
        nn.init.eye_(self.k.weight)

    def features(self, h, x, early_logits, token_start, first=0):
        with torch.autocast(h.device.type, enabled=False):
            h = h.float()
            cos = F.cosine_similarity(self.q(h[:, :-1]), self.k(h[:, 1:]), -1)          # (B, T-1)
        return F.pad(((1 - cos) / 2).clamp(1e-4, 1 - 1e-4), (1, 0), value=1.0)          # (B, T) p, p_0 = 1

    @torch.no_grad()
    def sample(self, v, u):
        return v >= 0.5

    def soft(self, v, a, u):
        return v

    def spread(self, c, p, a, chunks):
        c = smooth(c, p.flatten()[chunks.end], chunks.slots.size(1))                    # (M, C)
        confidence = torch.where(a, p, 1 - p)
        confidence = 1 + (confidence - confidence.detach())                             # 1 forward, straight-through
        return take(c, chunks.of) * confidence.unsqueeze(-1)                            # (B, T, C)

    def spread_step(self, c, p, a, s):
        p = p.unsqueeze(-1)
        s.smoothed = torch.where(a.unsqueeze(-1), p * c + (1 - p) * s.smoothed, s.smoothed)
        return s.smoothed

    def loss(self, v, a, p, late, early, real, free, pairs):
        N = 1 / self.cfg.rate
        f = batch_mean(a, free)                                                         # F, share of boundaries
        G = (p * free).sum() / count(free)                                              # mean p, carries the gradient
        ratio = N / (N - 1) * ((N - 1) * f * G + (1 - f) * (1 - G))                     # 1 at f = G = 1/N, more where f = G is else
        return self.cfg.lambda_ratio * ratio, {}


def smooth(c, p, K):
    """Exponential moving average over a row's chunks, s_m = p_m c_m + (1 - p_m) s_{m-1}: c (M,C), p (M,) -> (M,C). It starts
    anew at each row, whose first p is 1.

    In log2(K) doublings: s covers the last n chunks, keep is the weight of what came before them."""
    p = p.unsqueeze(-1)                                                                 # (M, 1)
    s, keep, n = p * c, 1 - p, 1
    while n < K:
        s = torch.cat([s[:n], s[n:] + keep[n:] * s[:-n]])
        keep = torch.cat([keep[:n], keep[n:] * keep[:-n]])
        n *= 2
    return s


class Pooling(Chunker):
    """Dynamic pooling (Nawrot et al. 2023, arXiv 2211.09761): a relaxed Bernoulli draw, made hard straight-through. A
    boundary closes its chunk, the mean of whose bytes reaches the bytes from there on: no byte sees its own future."""

    def __init__(self, cfg):
        super().__init__(cfg)
        self.mlp = nn.Sequential(nn.Linear(cfg.n_embd, cfg.n_embd), nn.ReLU(), nn.Linear(cfg.n_embd, 1))

    def init_weights(self):
        nn.init.zeros_(self.mlp[0].bias)
        nn.init.constant_(self.mlp[2].bias, math.log(self.cfg.rate / (1 - self.cfg.rate)))

    def features(self, h, x, early_logits, token_start, first=0):
        with torch.autocast(h.device.type, enabled=False):
            return self.mlp(h.float()).squeeze(-1)                                      # (B, T) logits l

    @torch.no_grad()
    def sample(self, v, u):
        a = v >= torch.logit(fixed_noise(v.size(1), v.device) if u is None else u)
        a[:, 0] = True
        return a

    def decide(self, v, actions, t):
        return v[:, 1] >= torch.logit(fixed_noise(t + 1, v.device)[t])

    def soft(self, v, a, u):
        if u is None:
            return torch.sigmoid(v)
        return torch.sigmoid((v - torch.logit(u, eps=1e-6)) / 0.5)   # logistic noise, temperature 1/2; > 1/2 where a = 1

    def pool(self, h, p, a, chunks):
        M, C = len(chunks.end), h.size(2)
        hard = a + (p - p.detach())                                                     # a forward, straight-through
        before = hard.cumsum(1) - hard                                                  # boundaries before byte i
        weight = 1 + (before - before.detach())                                         # 1; carries that count's gradient
        m = chunks.of + ~a                                                              # (B, T) chunk that byte i is in ...
        m = torch.where(m > chunks.of[:, -1:], M, m).flatten()                          # ... M where the row leaves it open
        values = torch.cat([h.float() * weight.unsqueeze(-1), weight.unsqueeze(-1)], 2) # (B, T, C+1)
        sums = values.new_zeros(M + 1, C + 1).index_add(0, m, values.flatten(0, 1))[:M] # (M, C+1)
        return (sums[:, :-1] / sums[:, -1:].clamp(min=1e-9)).to(h.dtype)                # (M, C); spare ones unread

    def pool_step(self, h, a, s):
        s.sum, s.bytes = s.sum + h, s.bytes + 1                                         # of the open chunk
        mean = s.sum / s.bytes
        s.sum, s.bytes = (torch.where(a.unsqueeze(-1), 0, t) for t in (s.sum, s.bytes))
        return mean

    def loss(self, v, a, p, late, early, real, free, pairs):
        n = free.sum(1).float()                                                         # (B,)
        k = ((a + (p - p.detach())) * free).sum(1)                                      # (B,) boundaries, straight-through
        prior = torch.distributions.Binomial(n, torch.full_like(n, self.cfg.rate), validate_args=False)
        return -self.cfg.lambda_prior * (prior.log_prob(k) / n.clamp(min=1)).mean(), {}


# ---------------------------------------------------------------------------------------------------------------------
# cost, optimiser groups

def flops_per_byte(cfg, T, rate):
    """Training FLOPs (float) a byte of a row: 6 a weight it meets, and attention: 12 * keys * width, half where causal.

    rate is the actual share of boundaries: the main layers only work for that share of the bytes.
    """
    C = cfg.n_embd
    attention = 12 * cfg.window if cfg.window < T else 6 * T
    byte_layers = (cfg.n_enc + cfg.n_dec) * (7 * 6 * C * C + attention * C)
    main_layers = cfg.n_main * (16 * 6 * C * C + 6 * rate * T * C)
    router = {"hnet": 2, "pooling": 1}.get(cfg.chunker, 0) * 6 * C * C
    return byte_layers + rate * main_layers + router + 2 * 6 * VOCAB * C


def param_groups(model, lr, gate_lr, weight_decay):
    """AdamW's three groups, each with its peak_lr: matrices decay; gains, the embedding and chunkers do not. rl's policy has a
    rate of its own (differs from the paper): it must be sharp early, so that the main transformer can profit from its words.
    """
    gate = list(model.chunker.parameters())
    rest = [p for p in model.parameters() if all(p is not q for q in gate + [model.embed.weight])]
    return [dict(params=[p for p in rest if p.ndim == 2], peak_lr=lr, weight_decay=weight_decay),
            dict(params=[p for p in rest if p.ndim < 2] + [model.embed.weight], peak_lr=lr, weight_decay=0.0),
            dict(params=gate, peak_lr=gate_lr if model.cfg.chunker == "rl" else lr, weight_decay=0.0)]

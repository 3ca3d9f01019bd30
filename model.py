"""
A byte-level language model that learns where its own tokens end, by reinforcement learning.
Implements "You Can Learn Tokenization End-to-End with Reinforcement Learning", arXiv 2602.13940.

Read from top to bottom; the file follows a byte from its embedding to the losses:

    x (B,T) bytes ──> encoder, sliding window ──> h (B,T,C) ──> early exit: log p_early(next byte)
                                                  │    │
                      policy: p = sigmoid(l), a ~ Bernoulli(p): "does a chunk end after this byte?"
                                                  │    │
        downsample: keep h where a = 1 (B,M,C) <──┘    │
              │                                        │
        main transformer over the M chunks             │
              │                                        │
        upsample: every byte gets its last chunk ──> z = h + y ──> decoder ──> late head: log p(next byte)

The draw of `a` has no gradient. It is trained as an action instead (score function, REINFORCE): its reward is
how much better the late head predicts than the early exit, which never sees a boundary.

Symbols: B rows, T bytes, M chunks, C width, H heads, d head size; p probability of a boundary, l its logit,
a action (1 = boundary), u uniform noise, R reward, A advantage, gamma discount. All losses are nats in fp32.
"""
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SEPARATOR = 256   # starts every document and every row; text is bytes 0..255 and cannot contain it
VOCAB = 257
NO_TARGET = -1    # target of a position that predicts nothing: padding, or the byte before a separator


# ---------------------------------------------------------------------------------------------------------------------
# settings

@dataclass
class ModelConfig:
    """What the model and its losses are made of. train.py adds the run's settings and makes the command line."""
    n_embd: int = 768             # C, width of every layer
    n_head: int = 12              # H, heads; the paper's head size is 64
    n_enc: int = 4                # byte layers before the boundaries
    n_main: int = 12              # layers that see only chunks
    n_dec: int = 4                # byte layers after them
    window: int = 64              # bytes that a byte layer sees, the current one included
    rate: float = 0.2             # target share of bytes that end a chunk
    policy_window: int = 1        # w: 1 = boundaries independent given the bytes; w > 1 also sees the last w-1 actions
    gate_scale: float = 1.0       # s in the boundary logit; 1/16 in the paper
    gamma: float = 0.99           # discount of later rewards; 1 = none
    lambda_pi: float = 0.1        # weight of the score-function loss; 0.01 in the paper
    lambda_target: float = 0.1    # weight of the loss that holds the rate at its target; 0.01 in the paper
    lambda_early: float = 0.1     # share of the early exit in the likelihood loss
    early_relative: bool = True   # reward relative to the early exit's log-likelihood
    batch_relative: bool = True   # reward relative to its mean over the batch at the same position


# ---------------------------------------------------------------------------------------------------------------------
# norm, rotary embedding, attention, MLP, block

class RMSNorm(torch.autograd.Function):
    """y = x / rms(x) over the last axis. By hand, because eager autograd through F.rms_norm is some four times slower on a
    CPU and there are five of these in every block."""

    @staticmethod
    def forward(ctx, x, dtype):
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32) * x.size(-1) ** -0.5   # (..., 1)
        r = (r + 1e-6).reciprocal()
        y = (x * r).to(dtype)
        ctx.save_for_backward(y, r)
        ctx.dtype = x.dtype
        return y

    @staticmethod
    def backward(ctx, g):
        y, r = ctx.saved_tensors
        return (torch.addcmul(g, y, (g * y).mean(-1, keepdim=True), value=-1) * r).to(ctx.dtype), None


def norm(x, dtype=None):
    """Root-mean-square norm without a gain (a linear map that follows can hold it), by default in the dtype of matmuls."""
    if dtype is None:
        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
    return RMSNorm.apply(x, dtype)


def rotary_table(T, d, device):
    """(T, d/2) complex unit numbers exp(i * t * 10000^(-2k/d)): integer positions, fp32 angles (bf16 would blur them)."""
    freq = 10000.0 ** (-torch.arange(0, d, 2, device=device, dtype=torch.float32) / d)
    angle = torch.outer(torch.arange(T, device=device, dtype=torch.float32), freq)
    return torch.polar(torch.ones_like(angle), angle)


def rotate(x, rope):
    """Rotary embedding: pairs of features turn by an angle that grows with position. x (B,T,H,d) fp32, rope (B or 1,T,d/2)."""
    z = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rope.unsqueeze(2)   # (B, T, H, d/2)
    return torch.view_as_real(z).flatten(-2)                                          # (B, T, H, d)


def window_mask(B, T, window, device):
    """Who may see whom inside the folded blocks of window_attention: (B*n, 1, W, 2W) bool with W = window, n = ceil(T/W)."""
    n = -(-T // window)
    i = torch.arange(window, 2 * window, device=device)[:, None]   # query, counted from the start of the previous block
    j = torch.arange(2 * window, device=device)                    # key, previous block first
    mask = ((j <= i) & (j > i - window)).repeat(n, 1, 1)           # (n, W, 2W)
    mask[0, :, :window] = False                                    # the first block has no previous one
    return mask.repeat(B, 1, 1).unsqueeze(1)                       # (B*n, 1, W, 2W)


def window_attention(q, k, v, mask, window):
    """Causal attention to the last `window` positions, itself included, at a cost of O(T * window), never T * T.

    q, k, v (B,T,H,d) -> (B,T,H,d). The row is cut into blocks of W = window bytes which fold into the batch; each block
    attends to itself and the block before, which together hold every key in reach:

        block          0      1      2
        queries      [abc]  [def]  [ghi]
        keys      [...abc][abcdef][defghi]
    """
    B, T, H, d = q.shape
    n = -(-T // window)

    def fold(x, with_previous):
        x = F.pad(x, (0, 0, 0, 0, 0, n * window - T)) if n * window > T else x
        x = x.view(B, n, window, H, d)
        if with_previous:
            x = torch.cat([x.roll(1, 1), x], 2)   # (B, n, 2W, H, d); block 0 gets the last one, which the mask hides
        return x.flatten(0, 1).transpose(1, 2)    # (B*n, H, W or 2W, d)

    y = scaled_dot_product(fold(q, False), fold(k, True), fold(v, True), mask[:B * n])   # (B*n, H, W, d)
    return y.transpose(1, 2).reshape(B, n * window, H, d)[:, :T]


def scaled_dot_product(q, k, v, mask=None):
    """Attention of q (B,H,Tq,d) to k, v (B,H,Tk,d) where mask allows it; causal without a mask."""
    if q.device.type == "cpu":   # fp32: the backward pass of the CPU's bf16 kernel is several times slower
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(q.float(), k.float(), v.float(), mask, is_causal=mask is None)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)


class Attention(nn.Module):
    def __init__(self, cfg, window):
        super().__init__()
        self.n_head, self.window = cfg.n_head, window
        self.qk = nn.Linear(cfg.n_embd, 2 * cfg.n_embd, bias=False)
        self.v = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)
        self.out = nn.Linear(cfg.n_embd, cfg.n_embd, bias=False)

    def forward(self, x, rope, mask):
        B, T, C = x.shape
        # differs from the paper: queries and keys are normed, which lets learning rates be higher
        qk = norm(self.qk(x).view(B, T, 2 * self.n_head, -1), torch.float32)         # (B, T, 2H, d)
        q, k = rotate(qk, rope).view(B, T, 2, self.n_head, -1).unbind(2)             # (B, T, H, d) each
        v = self.v(x).view(B, T, self.n_head, -1)                                    # (B, T, H, d)
        q, k = q.to(v.dtype), k.to(v.dtype)
        if self.window:
            y = window_attention(q, k, v, mask, self.window)
        else:
            y = scaled_dot_product(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)
        return self.out(y.reshape(B, T, C))


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
    """Attention and MLP, each with a norm before and after it (paper, appendix). The norms after have a gain a channel."""

    def __init__(self, cfg, hidden, window):
        super().__init__()
        self.attn, self.attn_gain = Attention(cfg, window), nn.Parameter(torch.ones(cfg.n_embd))
        self.mlp, self.mlp_gain = MLP(cfg.n_embd, hidden), nn.Parameter(torch.ones(cfg.n_embd))

    def forward(self, x, rope, mask):
        x = torch.addcmul(x, norm(self.attn(norm(x), rope, mask), x.dtype), self.attn_gain)
        return torch.addcmul(x, norm(self.mlp(norm(x)), x.dtype), self.mlp_gain)


class Transformer(nn.Module):
    """A stack of blocks: over bytes with a window, or (window 0) over chunks with full causal attention."""

    def __init__(self, cfg, n_layer, mlp_ratio, window=0):
        super().__init__()
        self.blocks = nn.ModuleList(Block(cfg, mlp_ratio * cfg.n_embd, window) for _ in range(n_layer))

    def forward(self, x, rope, mask=None):
        for block in self.blocks:
            x = block(x, rope, mask)
        return x


# ---------------------------------------------------------------------------------------------------------------------
# the policy: where does a chunk end?

CAP = 6.0   # soft cap of the boundary logit: p stays within 0.0025 .. 0.9975, so that no action becomes impossible


class Policy(nn.Module):
    """Boundary logits. With h_i normed, W a linear map to w numbers, and a the actions so far (paper, section 3):

        v_i = W h_i,    l_i = cap(s * (v_i[0] + sum_{k=1}^{w-1} v_i[k] * a_{i-k}) + logit(rate)),    p_i = sigmoid(l_i)

    differs from the paper: h_i is normed first, and the cap is the same in training and in evaluation.
    """

    def __init__(self, cfg):
        super().__init__()
        self.scale, self.bias = cfg.gate_scale, math.log(cfg.rate / (1 - cfg.rate))
        self.linear = nn.Linear(cfg.n_embd, cfg.policy_window)

    def features(self, h):
        """h (B,T,C) -> scaled v (B,T,w) in fp32."""
        with torch.autocast(h.device.type, enabled=False):
            return self.scale * self.linear(norm(h.float()))

    def logits(self, v, a):
        """v (B,T,w) and actions a (B,T) -> capped logits l (B,T), all positions at once."""
        l, a = v[..., 0], a.to(v.dtype)
        for k in range(1, v.size(-1)):
            l = l + v[..., k] * F.pad(a[:, :-k], (min(k, a.size(1)), 0))[:, :a.size(1)]   # a_{i-k}, 0 before the row
        return CAP * torch.tanh((l + self.bias) / CAP)

    @torch.no_grad()
    def sample(self, v, u):
        """Draw every action of a row: a_i = 1 where u_i <= p_i, and a_0 = 1 always. No loop over T.

        v (B,T,w) features, u (B,T) uniforms in [0,1) -> a (B,T) bool. u = 1/2 everywhere is the greedy choice p >= 1/2.
        The noise u_i decides a_i and nothing else, so that rows, prefixes and cached generation all agree.
        """
        # u <= sigmoid(CAP * tanh(l/CAP))  <=>  l >= t: solve for the logit, once a byte instead of once a state
        t = CAP * torch.atanh((torch.logit(u) / CAP).clamp(-1, 1)) - self.bias   # (B, T), infinite beyond the cap
        if v.size(-1) == 1:
            a = v[..., 0] >= t
        else:
            a = sample_scan(v, t)
        a[:, 0] = True
        return a


def sample_scan(v, t, piece=512):
    """Sample where each action depends on the w-1 before it, without a loop over T. v (B,T,w), t (B,T) -> a (B,T) bool.

    State s = the last w-1 actions as bits, the newest lowest. With its noise fixed, byte i is a function from the state
    before it to the state after it, a table of S = 2^(w-1) entries, and functions compose associatively:

        up    f_0   f_1   f_2   f_3        compose neighbours, then pairs of neighbours, ...
                f_01        f_23
        down  state before f_0 is known -> before f_23 -> before f_1, f_3      one look-up each

    Rows go through in pieces of 512 bytes, only so that the tables stay in cache.
    """
    B, T, w = v.shape
    S = 2 ** (w - 1)
    state = torch.zeros(B, 1, dtype=torch.long, device=v.device)               # before the row: no boundary
    out = []
    for i in range(0, T, piece):
        l = v[:, i:i + piece, :1]                                              # (B, n, 1)
        for k in range(1, w):                                                  # bit k-1 of the state is a_{i-k}
            l = torch.cat([l, l + v[:, i:i + piece, k:k + 1]], -1)             # (B, n, 2^k)
        a = l >= t[:, i:i + piece].unsqueeze(-1)                               # (B, n, S) the action in every state
        if i == 0:
            a[:, 0] = True
        n = a.size(1)
        a = F.pad(a, (0, 0, 0, 2 ** max(1, (n - 1).bit_length()) - n))         # (B, N, S), N a power of two

        # two bytes at a time need no look-up: the first action picks the odd or the even states of the second byte
        one, two = a[:, 0::2], a[:, 1::2]                                      # (B, N/2, S) each
        two = torch.where(one.unflatten(2, (2, -1)), two[:, :, None, 1::2], two[:, :, None, 0::2]).flatten(2)
        f = (torch.arange(S, device=v.device) << 2 | (one.byte() << 1 | two.byte())) & (S - 1)
        levels = [f]                                                           # state after two bytes, for every state
        while f.size(1) > 1:
            f = f[:, 1::2].gather(2, f[:, 0::2])                               # second after first: half as many
            levels.append(f)
        before = state                                                         # (B, 1)
        state = f.gather(2, state.unsqueeze(-1)).squeeze(-1)                   # (B, 1) behind the piece
        for f in reversed(levels[:-1]):
            after = f[:, 0::2].gather(2, before.unsqueeze(-1)).squeeze(-1)     # behind each first half
            before = torch.stack([before, after], 2).flatten(1)                # twice as many
        pair = torch.stack([one, two], 2).gather(3, before[:, :, None, None].expand(-1, -1, 2, 1))   # (B, N/2, 2, 1)
        out.append(pair.flatten(1)[:, :n])
    return torch.cat(out, 1)


# ---------------------------------------------------------------------------------------------------------------------
# between bytes and chunks

def chunk_index(a):
    """Where chunks are, from actions a (B,T) bool with a[:,0] = 1.

        byte i        0  1  2  3  4  5  6
        a             1  0  0  1  0  1  0
        g(i)          0  0  0  1  1  2  2      the last boundary at or before i
        start         0  3  5                  the byte of boundary m

    Returns start (B,M), g (B,T), M the largest count in the batch; shorter rows are padded with start 0, which is
    harmless: padding comes last, so causal attention keeps it from every real chunk, and g never points to it.
    """
    g = a.long().cumsum(1) - 1                                             # (B, T)
    M = int(g[:, -1].max()) + 1                                            # the one host sync of a step
    t = torch.arange(a.size(1), device=a.device).expand_as(g)
    start = t.new_zeros(a.size(0), M + 1)
    start.scatter_(1, torch.where(a, g, M), t)                             # non-boundaries all land in a spare slot
    return start[:, :M], g


def take(x, index):
    """x (B,N,C) rows picked by index (B,K) -> (B,K,C)."""
    B, N, C = x.shape
    index = index + N * torch.arange(B, device=x.device).unsqueeze(1)      # flat row numbers
    return x.reshape(B * N, C).index_select(0, index.flatten()).view(B, -1, C)


# ---------------------------------------------------------------------------------------------------------------------
# likelihoods, rewards, advantages and the score-function loss

class CrossEntropy(torch.autograd.Function):
    """-log softmax(logits)[y] in fp32, piece by piece: of the (N,257) logits no fp32 copy is ever whole, and what the backward
    pass keeps is the logits as they came. Eager autograd holds three fp32 copies and takes three times as long on a CPU."""

    @staticmethod
    def forward(ctx, logits, y):                                                        # (N, 257), (N,)
        piece = 1024 if logits.device.type == "cpu" else 65536                          # fits a core's cache
        lse = torch.cat([z.float().logsumexp(-1) for z in logits.split(piece)])         # (N,)
        chosen = logits.gather(1, y.clamp(min=0).unsqueeze(1)).squeeze(1).float()       # (N,)
        ctx.save_for_backward(logits, y, lse)
        ctx.piece = piece
        return torch.where(y == NO_TARGET, 0.0, lse - chosen)                           # (N,)

    @staticmethod
    def backward(ctx, g):                                                               # d nll / d logits = p - onehot(y)
        logits, y, lse = ctx.saved_tensors
        g = torch.where(y == NO_TARGET, 0.0, g).unsqueeze(1)                            # (N, 1)
        grad = torch.empty_like(logits)
        for out, *rest in zip(*(t.split(ctx.piece) for t in (grad, logits, y.clamp(min=0).unsqueeze(1), lse.unsqueeze(1), g))):
            z, y, lse, g = rest
            out.copy_((z.float() - lse).exp_().scatter_add_(1, y, torch.full_like(g, -1.0)).mul_(g))
        return grad, None


def nll(logits, y):
    """Negative log-likelihood in nats, fp32: logits (B,T,257), y (B,T) -> (B,T), 0 where y is NO_TARGET."""
    return CrossEntropy.apply(logits.flatten(0, -2), y.flatten()).view(y.shape)


def all_sum(x):
    """Sum over ranks, without gradient; x itself in a single process."""
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(x)
    return x


def discounted_sum(R, gamma):
    """A_i = sum_{j >= i} gamma^(j-i) R_j for R (B,T), in log2(T) doublings: A always covers the next s rewards."""
    A, s = R, 1
    while s < R.size(1):
        A = torch.cat([A[:, :-s] + gamma ** s * A[:, s:], A[:, -s:]], 1)   # (B, T)
        s *= 2
    return A


def centre(R, real, pairs, batch_relative):
    """Subtract from R (B,T) what the boundaries did not cause; entries where real is False are 0 before and after.

    Rows r and r + pairs, r < pairs, are twins: the same text with independently sampled boundaries. Each is centred on
    the mean of the two. With batch_relative all other rows are centred on the batch mean at the same position, over
    real targets only and over all ranks.
    """
    twins, rest = R[:2 * pairs], R[2 * pairs:]
    twins = twins - twins.view(2, pairs, R.size(1)).mean(0).repeat(2, 1)
    if batch_relative:
        total, count = all_sum(torch.stack([rest.sum(0), real[2 * pairs:].sum(0).float()]))   # (T,) each
        rest = rest - total / count.clamp(min=1)
    return torch.cat([twins, rest]) * real


# ---------------------------------------------------------------------------------------------------------------------
# the model

class ByteLM(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(VOCAB, cfg.n_embd)
        self.encoder = Transformer(cfg, cfg.n_enc, 1, cfg.window)
        self.early_head = nn.Linear(cfg.n_embd, VOCAB, bias=False)
        self.policy = Policy(cfg)
        self.main = Transformer(cfg, cfg.n_main, 4)
        self.decoder = Transformer(cfg, cfg.n_dec, 1, cfg.window)
        self.late_head = nn.Linear(cfg.n_embd, VOCAB, bias=False)
        self.init_weights()

    def init_weights(self):
        """Embedding N(0,1); linear maps N(0, 1/(3*fan_in)); heads a third of that, so that the first loss is ln 257;
        policy 0, so that the first boundaries are uniform at the target rate."""
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=(3 * m.in_features) ** -0.5)
        for head in (self.early_head, self.late_head):
            nn.init.normal_(head.weight, std=(3 * head.in_features) ** -0.5 / 3)
        nn.init.zeros_(self.policy.linear.weight)
        nn.init.zeros_(self.policy.linear.bias)

    def forward(self, x, y=None, u=None, pairs=0):
        """One pass over rows of bytes; with targets also the losses.

        x      (B-pairs, T) ids 0..256, each row starting with SEPARATOR
        y      (B-pairs, T) the next byte of each position, NO_TARGET where there is none; or None
        u      (B, T) uniforms in [0,1) that decide the boundaries; None = greedy, p >= 1/2
        pairs  the first `pairs` rows of x run twice, with boundaries of their own (twins, see `centre`)

        Returns a dict: logits, early_logits (B,T,257), v (B,T,w), p (B,T), a (B,T) bool; with y also loss () and stats, a dict of
        detached scalars.
        """
        d = self.cfg.n_embd // self.cfg.n_head
        rope = rotary_table(x.size(1), d, x.device).unsqueeze(0)                        # (1, T, d/2)
        mask = window_mask(x.size(0) + pairs, x.size(1), self.cfg.window, x.device)
        h = self.encoder(self.embed(x), rope, mask)                                     # (B-pairs, T, C)
        early_logits = self.early_head(norm(h))                                         # (B-pairs, T, 257)

        if pairs:   # twins share everything up to here
            twice = lambda t: torch.cat([t[:pairs], t])
            h, early_logits = twice(h), twice(early_logits)                             # (B, T, ...)
            y = None if y is None else twice(y)
        v = self.policy.features(h)                                                     # (B, T, w)
        a = self.policy.sample(v, torch.full(v.shape[:2], 0.5, device=x.device) if u is None else u)
        l = self.policy.logits(v, a)                                                    # (B, T)

        start, g = chunk_index(a)                                                       # (B, M), (B, T)
        c = self.main(take(h, start), rope[0, start])                                   # (B, M, C)
        z = self.decoder(h + take(c, g), rope, mask)                                    # (B, T, C)
        logits = self.late_head(norm(z))                                                # (B, T, 257)
        out = dict(logits=logits, early_logits=early_logits, v=v, p=torch.sigmoid(l), a=a)
        if y is not None:
            out["loss"], out["stats"] = self.losses(logits, early_logits, l, a, y, pairs)
        return out

    def losses(self, logits, early_logits, l, a, y, pairs):
        """All losses (paper, section 3), means over real target bytes of all ranks. Returns loss (), stats."""
        cfg = self.cfg
        late, early = nll(logits, y), nll(early_logits, y)                              # (B, T) nats, 0 where no target
        real = y != NO_TARGET
        free = real.flip(1).cumsum(1).flip(1) > 0      # actions with a reward still to come ...
        free[:, 0] = False                             # ... and not the forced first one

        with torch.no_grad():   # the reward is a number: no gradient reaches the heads through it
            R = -late + early if cfg.early_relative else -late
            A = discounted_sum(centre(R, real, pairs, cfg.batch_relative), cfg.gamma)       # (B, T)
            p = torch.sigmoid(l)
            world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
            sums = torch.stack([real.sum(), free.sum(), (p * free).sum()]).float()
            n, n_free, p_sum = (all_sum(sums) / world).clamp(min=1e-9)                  # per-rank shares: DDP averages
        log_pi = F.logsigmoid(torch.where(a, l, -l))                                    # (B, T) log-probability of a

        l_auto, l_early = late.sum() / n, early.sum() / n
        l_pi = -(A * log_pi * free).sum() / n
        l_target = (l * free).sum() / n_free * (p_sum / n_free - cfg.rate)
        loss = ((1 - cfg.lambda_early) * l_auto + cfg.lambda_early * l_early
                + cfg.lambda_pi * l_pi + cfg.lambda_target * l_target)

        with torch.no_grad():
            entropy = -(p * F.logsigmoid(l) + (1 - p) * F.logsigmoid(-l))
            stats = dict(late=l_auto, early=l_early, rate=(a & free).sum() / n_free, entropy=(entropy * free).sum() / n_free,
                         adv_std=((A ** 2 * free).sum() / n_free).sqrt())
        return loss, {k: s.detach() for k, s in stats.items()}

    @torch.no_grad()
    def generate(self, prompt, n, row_bytes, temperature=1.0, top_k=0, top_p=1.0, generator=None):
        """Continue `prompt` (bytes) by n bytes, yielded one int at a time; boundaries are greedy, as in evaluation.

        The whole row is computed anew for every byte; it holds the last row_bytes - 1 bytes at most.
        """
        row = list(prompt)
        for _ in range(n):
            row = row[-(row_bytes - 1):] if row_bytes > 1 else []
            x = torch.tensor([[SEPARATOR] + row], device=self.embed.weight.device)
            byte = int(sample_byte(self(x)["logits"][:, -1], temperature, top_k, top_p, generator))
            row.append(byte)
            yield byte


def sample_byte(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw the next byte from logits (B,257), never SEPARATOR -> (B,) ids 0..255.

    temperature 0 takes the likeliest; top_k (0 = all) keeps the k likeliest; top_p keeps the fewest that hold that share.
    """
    logits = logits[:, :SEPARATOR].float().cpu()                                        # (B, 256)
    if temperature == 0:
        return logits.argmax(-1)
    logits, order = (logits / temperature).sort(-1, descending=True)
    probs = logits.softmax(-1)
    probs[probs.cumsum(-1) - probs > top_p] = 0                                         # the likeliest always stays
    if top_k:
        probs[:, top_k:] = 0
    return order.gather(1, torch.multinomial(probs, 1, generator=generator)).squeeze(1)


# ---------------------------------------------------------------------------------------------------------------------
# cost, optimiser groups

def flops_per_byte(cfg, T, rate):
    """Training FLOPs a byte of text: 6 a weight it meets, plus attention (12 * keys * width, halved where causal).

    rate is the actual share of boundaries: the main layers only work for that share of the bytes.
    """
    C = cfg.n_embd
    byte_layers = (cfg.n_enc + cfg.n_dec) * (7 * 6 * C * C + 12 * min(cfg.window, T) * C)
    main_layers = cfg.n_main * (16 * 6 * C * C + 6 * rate * T * C)
    return byte_layers + rate * main_layers + 2 * 6 * VOCAB * C


def param_groups(model, lr, gate_lr, weight_decay):
    """AdamW groups: matrices decay, gains and the embedding do not, and the policy learns `gate_lr` times as fast.

    The last one matters: the policy must be sharp early, so that the main transformer has time to profit from its words.
    """
    policy = list(model.policy.parameters())
    skip = {id(p) for p in policy + [model.embed.weight]}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in skip]
    vectors = [p for p in model.parameters() if p.ndim < 2 and id(p) not in skip] + [model.embed.weight]
    return [dict(params=matrices, peak_lr=lr, weight_decay=weight_decay), dict(params=vectors, peak_lr=lr, weight_decay=0.0),
            dict(params=policy, peak_lr=lr * gate_lr, weight_decay=0.0)]

// The stored heads of masks.json: their attention, what summaries make of blocks, and a list of the
// best. The mask explorer and the choice share it; tests hold it against course/masks.py.
//
// Symbols: N positions, t a query's position, G query heads of the group, D head width, BS block
// size, NB blocks, M summaries.

function numbers(base64, scale) {
  const letters = atob(base64), found = new Float64Array(letters.length);
  for (let i = 0; i < found.length; i++) found[i] = ((letters.charCodeAt(i) << 24) >> 24) * scale;
  return found;
}

// masks.json as numbers: `q` [N, G, D] times D^-0.5 and `k` [N, D] of each group.
export function decode(data) {
  const { text, G, D } = data;
  const groups = data.groups.map((group) => ({
    label: group.label,
    q: numbers(group.q, group.q_scale * D ** -0.5),
    k: numbers(group.k, group.k_scale),
  }));
  return { text, N: text.length, G, D, groups };
}

function dot(a, i, b, j, D) {
  let sum = 0;
  for (let d = 0; d < D; d++) sum += a[i + d] * b[j + d];
  return sum;
}

// Softmax of the first n numbers of `scores`, in place.
function softmax(scores, n) {
  let largest = -Infinity, sum = 0;
  for (let i = 0; i < n; i++) largest = Math.max(largest, scores[i]);
  for (let i = 0; i < n; i++) sum += scores[i] = Math.exp(scores[i] - largest);
  for (let i = 0; i < n; i++) scores[i] /= sum;
}

// The share of its attention that query t gives to each key, [t + 1]: the mean over the heads.
export function attention(heads, group, t) {
  const { G, D } = heads, { q, k } = heads.groups[group];
  const shares = new Float64Array(t + 1), scores = new Float64Array(t + 1);
  for (let g = 0; g < G; g++) {
    for (let j = 0; j <= t; j++) scores[j] = dot(q, (t * G + g) * D, k, j * D, D);
    softmax(scores, t + 1);
    for (let j = 0; j <= t; j++) shares[j] += scores[j] / G;
  }
  return shares;
}

export const visibleSummaries = (t, length, stride) =>
  t + 1 < length ? 0 : Math.floor((t + 1 - length) / stride) + 1;

// How much the summaries' attention gives to each block, [N, NB], summed over the heads. A summary
// is a mean of keys; each `stride` of its tokens pass its whole weight to the block they lie in.
export function importance(heads, s) {
  const { N, G, D } = heads, { q, k } = heads.groups[s.group];
  const { length, stride } = s, BS = s.block_size, NB = Math.ceil(N / BS);
  const M = visibleSummaries(N - 1, length, stride), parts = length / stride;
  const means = new Float64Array(M * D);
  for (let j = 0; j < M; j++)
    for (let i = j * stride; i < j * stride + length; i++)
      for (let d = 0; d < D; d++) means[j * D + d] += k[i * D + d] / length;
  const found = new Float64Array(N * NB), scores = new Float64Array(M), sum = new Float64Array(M);
  for (let t = 0; t < N; t++) {
    const n = visibleSummaries(t, length, stride);
    if (!n) continue;
    sum.fill(0);
    for (let g = 0; g < G; g++) {
      for (let j = 0; j < n; j++) scores[j] = dot(q, (t * G + g) * D, means, j * D, D);
      softmax(scores, n);
      for (let j = 0; j < n; j++) sum[j] += scores[j];
    }
    for (let j = 0; j < n; j++)
      for (let part = 0; part < parts; part++)
        found[t * NB + Math.floor(((j + part) * stride) / BS)] += sum[j];
  }
  return found;
}

export const isForced = (s, own, block) =>
  block <= own && (block < s.num_initial || block > own - s.num_local);

// The ids of query t's list, ascending: forced blocks, then the best by `score(block)`; of equal
// ones the lower id.
export function choose(s, t, score) {
  const own = Math.floor(t / s.block_size), rank = new Float64Array(own + 1);
  let left = Math.min(s.top_n, own + 1);
  for (let b = 0; b <= own; b++) {
    rank[b] = isForced(s, own, b) ? Infinity : score(b);
    if (rank[b] === Infinity) left--;
  }
  for (; left > 0; left--) {
    let best = -1;
    for (let b = 0; b <= own; b++)
      if (rank[b] < Infinity && (best < 0 || rank[b] > rank[best])) best = b;
    rank[best] = Infinity;
  }
  const list = [];
  for (let b = 0; b <= own; b++) if (rank[b] === Infinity) list.push(b);
  return list;
}


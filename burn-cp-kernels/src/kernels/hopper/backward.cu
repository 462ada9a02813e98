// The products of the backward pass for head dims 64 and 128. Each of the two warpgroups owns 64 keys of the
// item's tile. Scores are computed transposed (keys x queries), so that the transposed probabilities and their
// gradients are, in the registers where they arise, the left factors of the products for dV and dK. For dQ
// the gradients of both warpgroups meet in shared memory.
//
// Registers (232 a thread) hold dK and dV, scores, gradients of probabilities, and 16-bit probabilities, but
// no f32 copy of these: the gradients of the scores are computed from the rounded probabilities.

// A warpgroup's part of dQ: half of the columns of 64 rows, or 64 of 128 rows.
#define DQ_COLUMNS (TILE_Q == 128 ? HEAD_DIM : HEAD_DIM / 2)

struct Rights {
  u32 k, v, q, o, q_along_n, o_along_n, ds, k_along_n;  // descriptors
};

__device__ __forceinline__ void issue_scores(float (&s)[TILE_Q / 2], const Rights& at, int stage) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++)
    Shared<TILE_Q, 0, 0>::run(s, at.k + step_along_k(k, K_PANEL), at.q + stage * (Q_BYTES >> 4) + step_along_k(k, Q_PANEL), k > 0);
  products_commit();
}

// Row statistics of this thread's queries: columns 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ void read_stats(float2 (&x)[TILE_Q / 8], u32 at) {
#pragma unroll
  for (int j = 0; j < TILE_Q / 8; j++) x[j] = load_shared_pair(at + j * 32);
}

// Scores become probabilities, from the log-sum-exps in units of log 2. With a cap, `slope` is the derivative
// of the capped score by the score.
__device__ __forceinline__ void probabilities(float (&s)[TILE_Q / 2], const float2 (&lse)[TILE_Q / 8], u32 (&slope)[TILE_Q / 4],
                                              float unit, float per_cap) {
#pragma unroll
  for (int j = 0; j < TILE_Q / 8; j++) {
#if HAS_SOFTCAP
#pragma unroll
    for (int e = 0; e < 4; e++) s[4 * j + e] = tanh_fast(s[4 * j + e] * per_cap);
    slope[2 * j] = pack2(1.0f - s[4 * j] * s[4 * j], 1.0f - s[4 * j + 1] * s[4 * j + 1]);
    slope[2 * j + 1] = pack2(1.0f - s[4 * j + 2] * s[4 * j + 2], 1.0f - s[4 * j + 3] * s[4 * j + 3]);
#endif
    s[4 * j] = exp2_fast(fmaf(s[4 * j], unit, -lse[j].x)), s[4 * j + 1] = exp2_fast(fmaf(s[4 * j + 1], unit, -lse[j].y));
    s[4 * j + 2] = exp2_fast(fmaf(s[4 * j + 2], unit, -lse[j].x)), s[4 * j + 3] = exp2_fast(fmaf(s[4 * j + 3], unit, -lse[j].y));
  }
}

// Probabilities of pairs that do not see each other become 0. Bounds are columns (queries) relative to this
// thread's first one.
__device__ __forceinline__ void mask_pairs(float (&s)[TILE_Q / 2], int low0, int high0, int low8, int high8) {
#pragma unroll
  for (int j = 0; j < TILE_Q / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int query = j * 8 + e;
      if (query < low0 || query >= high0) s[4 * j + e] = 0.0f;
      if (query < low8 || query >= high8) s[4 * j + 2 + e] = 0.0f;
    }
  }
}

// Gradients of the scores, without the factor of the scale.
__device__ __forceinline__ void score_gradients(u32 (&ds)[TILE_Q / 4], const float (&dp)[TILE_Q / 2], const u32 (&p)[TILE_Q / 4],
                                                const float2 (&delta)[TILE_Q / 8], const u32 (&slope)[TILE_Q / 4]) {
#pragma unroll
  for (int j = 0; j < TILE_Q / 4; j++) {
    const float2 d = delta[j >> 1];
    float low = low_of(p[j]) * (dp[2 * j] - d.x), high = high_of(p[j]) * (dp[2 * j + 1] - d.y);
#if HAS_SOFTCAP
    low *= low_of(slope[j]), high *= high_of(slope[j]);
#endif
    ds[j] = pack2(low, high);
  }
}

__device__ __forceinline__ void differentiate(const Buffers& buf, u32 base, const Barriers& bar, int group) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int row = (thread >> 5) * 16 + (lane >> 2);  // and row + 8, of the warpgroup's 64
  const int key = group * 64 + row;
  const float scale = __int_as_float((int)buf.params[6]);
#if HAS_SOFTCAP
  const float cap = __int_as_float((int)buf.params[7]), per_cap = scale / cap, unit = cap * LOG2_E;
#else
  const float per_cap = 0.0f, unit = scale * LOG2_E;
#endif
  Rights at;
  at.k = descriptor(base + AT_K + group * 8192, 0), at.v = descriptor(base + AT_V + group * 8192, 0);
  at.q = descriptor(base + AT_Q, 0), at.o = descriptor(base + AT_O, 0);
  at.q_along_n = descriptor(base + AT_Q, Q_PANEL), at.o_along_n = descriptor(base + AT_O, Q_PANEL);
#if TILE_Q == 128
  at.ds = descriptor(base + AT_DS + group * K_PANEL, K_PANEL), at.k_along_n = descriptor(base + AT_K, K_PANEL);
#else
  at.ds = descriptor(base + AT_DS, K_PANEL), at.k_along_n = descriptor(base + AT_K + group * (DQ_COLUMNS / 64) * K_PANEL, K_PANEL);
#endif
  // Where this lane's row of the four 8x8 matrices of a store goes; the piece within the row follows later.
  const int ds_row = group * 64 + (thread >> 5) * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
  const u32 ds_at = base + AT_DS + ds_row * 128;

  float dk[HEAD_DIM / 2], dv[V_HEAD_DIM / 2], s[TILE_Q / 2], dp[TILE_Q / 2], dq[DQ_COLUMNS / 2];
  u32 p[TILE_Q / 4], ds[TILE_Q / 4], slope[TILE_Q / 4];
#pragma unroll
  for (int i = 0; i < TILE_Q / 2; i++) s[i] = dp[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < TILE_Q / 4; i++) p[i] = ds[i] = slope[i] = 0;
#pragma unroll
  for (int i = 0; i < DQ_COLUMNS / 2; i++) dq[i] = 0.0f;
  u32 step_count = 0;

#pragma unroll 1
  for (int i = 0;; i++) {
    const int slot = i & (RING - 1);
    barrier_wait(bar.ring_full + 8 * slot, (i / RING) & 1);
    const u32 item = base + AT_RING + slot * 64;
    const int steps = load_shared1(item + 20);
    if (steps < 0) return;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 2; j++) dk[j] = 0.0f;
#pragma unroll
    for (int j = 0; j < V_HEAD_DIM / 2; j++) dv[j] = 0.0f;
    barrier_wait(bar.kv_full, i & 1);
    barrier_wait(bar.q_full + 8 * STAGE_OF(step_count), PARITY_OF(step_count));
    pin(s);
    products_fence();
    issue_scores(s, at, STAGE_OF(step_count));
    int n = 0;
#pragma unroll 1
    do {
      const u32 stage = STAGE_OF(step_count);
      // What the probabilities need besides the scores is read while those are under way.
      const u32 stats = base + AT_STATS + stage * STATS_BYTES + (lane & 3) * 8;
      const int4 mask = load_shared4(base + AT_STEPS + (step_count & (STEPS - 1)) * STEP_BYTES);  // own + right, own - left, keys
      float2 row_stats[TILE_Q / 8];
      read_stats(row_stats, stats);
      products_wait<0>();
      pin(s);
      barrier_wait(bar.o_full + 8 * stage, PARITY_OF(step_count));
      pin(dp);
      products_fence();
#pragma unroll
      for (int k = 0; k < V_HEAD_DIM / 16; k++)
        Shared<TILE_Q, 0, 0>::run(dp, at.v + step_along_k(k, K_PANEL), at.o + stage * (O_BYTES >> 4) + step_along_k(k, Q_PANEL), k > 0);
      products_commit();

      probabilities(s, row_stats, slope, unit, per_cap);
      const int first = group * 64, last = first + 63;
      if (last > mask.x || first < mask.y + TILE_Q - 1 || first < mask.z || last >= mask.w) {
        const int column = (lane & 3) * 2;
        int low0 = key - mask.x - column, high0 = key - mask.y + 1 - column, low8 = low0 + 8, high8 = high0 + 8;
        if (key < mask.z || key >= mask.w) high0 = -8;
        if (key + 8 < mask.z || key + 8 >= mask.w) high8 = -8;
        mask_pairs(s, low0, high0, low8, high8);
      }
#pragma unroll
      for (int j = 0; j < TILE_Q / 4; j++) p[j] = pack2(s[2 * j], s[2 * j + 1]);

      pin(dv);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_Q / 16; k++)
        Registers<V_HEAD_DIM, 1>::run(dv, p + 4 * k, at.o_along_n + stage * (O_BYTES >> 4) + step_along_n(k), 1);
      products_commit();
      read_stats(row_stats, stats + TILE_Q * 4);
      products_wait<1>();
      pin(dp);

      score_gradients(ds, dp, p, row_stats, slope);
      pin(dk);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_Q / 16; k++)
        Registers<HEAD_DIM, 1>::run(dk, ds + 4 * k, at.q_along_n + stage * (Q_BYTES >> 4) + step_along_n(k), 1);
      products_commit();
      const u32 ds_buffer = (step_count & 1) * DS_BYTES;
#pragma unroll
      for (int j = 0; j < TILE_Q / 16; j++)
        store_matrix4(ds_at + ds_buffer + (j >> 2) * K_PANEL + ((((j & 3) * 2 + (lane >> 4)) ^ (lane & 7)) << 4), ds[4 * j], ds[4 * j + 1],
                      ds[4 * j + 2], ds[4 * j + 3]);
      fence_async_shared();
      named_barrier(1, 256);  // both warpgroups' keys are needed for dQ
      pin(dq);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_K / 16; k++)
        Shared<DQ_COLUMNS, 1, 1>::run(dq, at.ds + (ds_buffer >> 4) + step_along_n(k), at.k_along_n + step_along_n(k), k > 0);
      products_commit();
      products_wait<1>();
      pin(dv), pin(dk), pin(p), pin(ds);
      // Only dQ is still under way, and it reads no queries. Every thread arrives: each has read row statistics.
      barrier_arrive(bar.step_empty + 8 * stage);
      // The next step's scores keep the tensor cores busy while this step's share leaves. After the last
      // step they are scores of stale queries, which nobody reads: a branch around products would make the
      // compiler wait for each of them.
      const u32 next = step_count + 1;
      if (n + 1 < steps) barrier_wait(bar.q_full + 8 * STAGE_OF(next), PARITY_OF(next));
      pin(s);
      products_fence();
      issue_scores(s, at, STAGE_OF(next));
      products_wait<1>();
      pin(dq);
      const u32 buffer = step_count % DQ_BUFFERS;
      barrier_wait(bar.dq_empty + 8 * buffer, ((step_count / DQ_BUFFERS) & 1) ^ 1);
#pragma unroll
      for (int j = 0; j < DQ_COLUMNS / 8; j++)
        store_shared4(base + AT_DQ + buffer * DQ_BYTES + group * (DQ_BYTES / 2) + j * 2048 + thread * 16, __float_as_uint(dq[4 * j]),
                      __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3]));
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(bar.dq_full + 8 * buffer);
      n++, step_count++;
    } while (n < steps);
    products_wait<0>();
    pin(s);
    if (lane == 0) barrier_arrive(bar.kv_empty);
    // Read only now, and the scale too: registers are scarce in the loop.
    const int4 place = load_shared4(item);
    const int kv_head = load_shared1(item + 16);
    barrier_arrive(bar.ring_empty + 8 * slot);
    const bool row_ok = key >= place.z && key < place.w, row8_ok = key + 8 >= place.z && key + 8 < place.w;
    const i64* stride = buf.params;
    const float factor = __int_as_float((int)stride[6]);
    half_bits* to = buf.dk + place.x * stride[0] + kv_head * stride[1] + (i64)(place.y + key) * stride[2];
    store_rows<HEAD_DIM>(dk, to, to + 8 * stride[2], (int)stride[11], factor, factor, row_ok, row8_ok, lane);
    to = buf.dv + place.x * stride[3] + kv_head * stride[4] + (i64)(place.y + key) * stride[5];
    store_rows<V_HEAD_DIM>(dv, to, to + 8 * stride[5], (int)stride[12], 1.0f, 1.0f, row_ok, row8_ok, lane);
  }
}

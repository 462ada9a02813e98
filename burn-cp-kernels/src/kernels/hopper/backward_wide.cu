// The products of the backward pass for head dims 192 (with values of 128) and 256. dK and dV of 64 keys fill
// the registers of two warpgroups, so a tile has 64 keys, and the warpgroups share it by columns: each computes
// the scores of half of the queries, both write their probabilities and gradients to shared memory, and each
// multiplies all of them with its columns.
//
// With two stages of queries (192) the next step's scores are under way while this step's share of dQ leaves;
// with one (256) they have to wait for the copies.

// Columns of dK, dV and dQ that warpgroup GROUP owns, in panels of 64: split so that both do the same work.
template <int GROUP>
struct Columns;
#if HEAD_DIM == 192
template <>
struct Columns<0> {
  static constexpr int K_FIRST = 0, K = 128, V_FIRST = 0, V = 64, Q_FIRST = 0, Q = 64;
};
template <>
struct Columns<1> {
  static constexpr int K_FIRST = 128, K = 64, V_FIRST = 64, V = 64, Q_FIRST = 64, Q = 128;
};
#else
template <int GROUP>
struct Columns {
  static constexpr int K_FIRST = GROUP * HEAD_DIM / 2, K = HEAD_DIM / 2, Q_FIRST = K_FIRST, Q = K;
  static constexpr int V_FIRST = GROUP * V_HEAD_DIM / 2, V = V_HEAD_DIM / 2;
};
#endif

#define HALF_Q (TILE_Q / 2)

// Two rows' worth of 8x8 matrices of a warpgroup's 32 queries, to a tile of 64 keys x 64 queries.
__device__ __forceinline__ void store_half(u32 tile, const u32 (&x)[HALF_Q / 4], int group, int thread) {
  const int lane = thread & 31, row = (thread >> 5) * 16 + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
  for (int j = 0; j < HALF_Q / 16; j++)
    store_matrix4(tile + row * 128 + (((group * 4 + j * 2 + (lane >> 4)) ^ (lane & 7)) << 4), x[4 * j], x[4 * j + 1], x[4 * j + 2], x[4 * j + 3]);
}

template <int GROUP>
__device__ __forceinline__ void differentiate_half(const Buffers& buf, u32 base, const Barriers& bar) {
  using Own = Columns<GROUP>;
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int key = (thread >> 5) * 16 + (lane >> 2);  // and key + 8
  const float scale = __int_as_float((int)buf.params[6]);
#if HAS_SOFTCAP
  const float cap = __int_as_float((int)buf.params[7]), per_cap = scale / cap, unit = cap * LOG2_E;
#else
  const float unit = scale * LOG2_E;
#endif
  const u32 k_at = descriptor(base + AT_K, 0), v_at = descriptor(base + AT_V, 0);
  const u32 q_at = descriptor(base + AT_Q + GROUP * HALF_Q * 128, 0), o_at = descriptor(base + AT_O + GROUP * HALF_Q * 128, 0);
  const u32 p_at = descriptor(base + AT_P, 0), ds_at = descriptor(base + AT_DS, 0), ds_along_m = descriptor(base + AT_DS, K_PANEL);
  const u32 o_columns = descriptor(base + AT_O + Own::V_FIRST / 64 * Q_PANEL, Q_PANEL);
  const u32 q_columns = descriptor(base + AT_Q + Own::K_FIRST / 64 * Q_PANEL, Q_PANEL);
  const u32 k_columns = descriptor(base + AT_K + Own::Q_FIRST / 64 * K_PANEL, K_PANEL);

  float dk[Own::K / 2], dv[Own::V / 2], dq[Own::Q / 2], s[HALF_Q / 2], dp[HALF_Q / 2];
#pragma unroll
  for (int i = 0; i < HALF_Q / 2; i++) s[i] = dp[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < Own::Q / 2; i++) dq[i] = 0.0f;
  u32 step_count = 0;
  // Scores and gradients of the probabilities of one stage.
  auto issue = [&](u32 stage) {
    pin(s), pin(dp);
    products_fence();
#pragma unroll
    for (int k = 0; k < HEAD_DIM / 16; k++)
      Shared<HALF_Q, 0, 0>::run(s, k_at + step_along_k(k, K_PANEL), q_at + stage * (Q_BYTES >> 4) + step_along_k(k, Q_PANEL), k > 0);
#pragma unroll
    for (int k = 0; k < V_HEAD_DIM / 16; k++)
      Shared<HALF_Q, 0, 0>::run(dp, v_at + step_along_k(k, K_PANEL), o_at + stage * (O_BYTES >> 4) + step_along_k(k, Q_PANEL), k > 0);
    products_commit();
  };

#pragma unroll 1
  for (int i = 0;; i++) {
    const int slot = i & (RING - 1);
    barrier_wait(bar.ring_full + 8 * slot, (i / RING) & 1);
    const u32 item = base + AT_RING + slot * 64;
    const int steps = load_shared1(item + 20);
    if (steps < 0) return;
#pragma unroll
    for (int j = 0; j < Own::K / 2; j++) dk[j] = 0.0f;
#pragma unroll
    for (int j = 0; j < Own::V / 2; j++) dv[j] = 0.0f;
    barrier_wait(bar.kv_full, i & 1);
#if STAGES > 1
    barrier_wait(bar.q_full + 8 * STAGE_OF(step_count), PARITY_OF(step_count));
    barrier_wait(bar.o_full + 8 * STAGE_OF(step_count), PARITY_OF(step_count));
    issue(STAGE_OF(step_count));
#endif
    int n = 0;
#pragma unroll 1
    do {
      const u32 stage = STAGE_OF(step_count);
#if STAGES == 1
      barrier_wait(bar.q_full, PARITY_OF(step_count));
      barrier_wait(bar.o_full, PARITY_OF(step_count));
      issue(stage);
#endif
      const u32 stats = base + AT_STATS + stage * STATS_BYTES + (GROUP * HALF_Q + (lane & 3) * 2) * 4;
      int4 mask = load_shared4(base + AT_STEPS + (step_count & (STEPS - 1)) * STEP_BYTES);  // own + right, own - left, keys
      mask.x += GROUP * HALF_Q, mask.y += GROUP * HALF_Q;
      products_wait<0>();
      pin(s), pin(dp);

      u32 p[HALF_Q / 4], ds[HALF_Q / 4];
#if HAS_SOFTCAP
      float slope[HALF_Q / 2];
#endif
#pragma unroll
      for (int j = 0; j < HALF_Q / 2; j++) {
#if HAS_SOFTCAP
        s[j] = tanh_fast(s[j] * per_cap);
        slope[j] = 1.0f - s[j] * s[j];
#endif
        const float2 l = load_shared_pair(stats + j / 4 * 32);
        s[j] = exp2_fast(fmaf(s[j], unit, j & 1 ? -l.y : -l.x));
      }
      if (63 > mask.x || 0 < mask.y + HALF_Q - 1 || 0 < mask.z || 63 >= mask.w) {
        const int column = (lane & 3) * 2;
        int low0 = key - mask.x - column, high0 = key - mask.y + 1 - column, low8 = low0 + 8, high8 = high0 + 8;
        if (key < mask.z || key >= mask.w) high0 = -8;
        if (key + 8 < mask.z || key + 8 >= mask.w) high8 = -8;
#pragma unroll
        for (int j = 0; j < HALF_Q / 2; j++) {
          const int query = j / 4 * 8 + (j & 1);
          if (j & 2 ? query < low8 || query >= high8 : query < low0 || query >= high0) s[j] = 0.0f;
        }
      }
#pragma unroll
      for (int j = 0; j < HALF_Q / 4; j++) {
        const float2 d = load_shared_pair(stats + TILE_Q * 4 + j / 2 * 32);
        float low = s[2 * j] * (dp[2 * j] - d.x), high = s[2 * j + 1] * (dp[2 * j + 1] - d.y);
#if HAS_SOFTCAP
        low *= slope[2 * j], high *= slope[2 * j + 1];
#endif
        p[j] = pack2(s[2 * j], s[2 * j + 1]), ds[j] = pack2(low, high);
      }
      const u32 buffer = (step_count & 1) * DS_BYTES;
      store_half(base + AT_P + buffer, p, GROUP, thread);
      store_half(base + AT_DS + buffer, ds, GROUP, thread);
      fence_async_shared();
      named_barrier(1, 256);  // both halves of the queries are needed

      pin(dv), pin(dk), pin(dq);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_Q / 16; k++)
        Shared<Own::V, 0, 1>::run(dv, p_at + (buffer >> 4) + step_along_k(k, K_PANEL), o_columns + stage * (O_BYTES >> 4) + step_along_n(k), 1);
#pragma unroll
      for (int k = 0; k < TILE_Q / 16; k++)
        Shared<Own::K, 0, 1>::run(dk, ds_at + (buffer >> 4) + step_along_k(k, K_PANEL), q_columns + stage * (Q_BYTES >> 4) + step_along_n(k), 1);
      products_commit();
#pragma unroll
      for (int k = 0; k < TILE_K / 16; k++)
        Shared<Own::Q, 1, 1>::run(dq, ds_along_m + (buffer >> 4) + step_along_n(k), k_columns + step_along_n(k), k > 0);
      products_commit();
#if STAGES > 1
      // After the last step these are scores of stale queries, which nobody reads: a branch around products
      // would make the compiler wait for each of them.
      const u32 next = step_count + 1;
      if (n + 1 < steps) {
        barrier_wait(bar.q_full + 8 * STAGE_OF(next), PARITY_OF(next));
        barrier_wait(bar.o_full + 8 * STAGE_OF(next), PARITY_OF(next));
      }
      issue(STAGE_OF(next));
      products_wait<2>();
      pin(dv), pin(dk);
      barrier_arrive(bar.step_empty + 8 * stage);
      products_wait<1>();
#else
      products_wait<1>();
      pin(dv), pin(dk);
      barrier_arrive(bar.step_empty + 8 * stage);
      products_wait<0>();
#endif
      pin(dq);
      const u32 share = step_count % DQ_BUFFERS;
      barrier_wait(bar.dq_empty + 8 * share, ((step_count / DQ_BUFFERS) & 1) ^ 1);
#pragma unroll
      for (int j = 0; j < Own::Q / 8; j++)
        store_shared4(base + AT_DQ + share * DQ_BYTES + Own::Q_FIRST * (TILE_Q * 4) + j * 2048 + thread * 16, __float_as_uint(dq[4 * j]),
                      __float_as_uint(dq[4 * j + 1]), __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3]));
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(bar.dq_full + 8 * share);
      n++, step_count++;
    } while (n < steps);
    products_wait<0>();
    pin(s), pin(dp);
    if (lane == 0) barrier_arrive(bar.kv_empty);
    const int4 place = load_shared4(item);
    const int kv_head = load_shared1(item + 16);
    barrier_arrive(bar.ring_empty + 8 * slot);
    const bool row_ok = key >= place.z && key < place.w, row8_ok = key + 8 >= place.z && key + 8 < place.w;
    const i64* stride = buf.params;
    half_bits* to = buf.dk + place.x * stride[0] + kv_head * stride[1] + (i64)(place.y + key) * stride[2] + Own::K_FIRST;
    store_rows<Own::K>(dk, to, to + 8 * stride[2], (int)stride[11] - Own::K_FIRST, scale, scale, row_ok, row8_ok, lane);
    to = buf.dv + place.x * stride[3] + kv_head * stride[4] + (i64)(place.y + key) * stride[5] + Own::V_FIRST;
    store_rows<Own::V>(dv, to, to + 8 * stride[5], (int)stride[12] - Own::V_FIRST, 1.0f, 1.0f, row_ok, row8_ok, lane);
  }
}

__device__ __forceinline__ void differentiate(const Buffers& buf, u32 base, const Barriers& bar, int group) {
  if (group == 0)
    differentiate_half<0>(buf, base, bar);
  else
    differentiate_half<1>(buf, base, bar);
}

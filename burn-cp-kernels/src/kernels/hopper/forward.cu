// Attention forward: outputs and log-sum-exps of the queries of a list of segments.
//
// A block owns one multiprocessor and works through a list of items that the host made. An item is GROUPS
// groups of 64 query rows (usually consecutive rows of one head) and the tiles of keys that they see. Roles:
//   warp 0   reads the item list and starts the copies of Q, K and V tiles;
//   warp 1   zeros the rows of V tiles that lie outside the segment;
//   warpgroups 1 to GROUPS each own 64 query rows: scores in registers, softmax, products with V.
// The products of tile n's scores are issued before those of tile n-1's probabilities with V, so that the
// tensor cores have work while the exponentials of tile n are computed.
//
// Tiles of keys are counted from the beginning of the document, and a tile whose keys a row does not see
// at all leaves the row's state as it is, to the bit. So a row's result does not depend on the rows beside
// it nor on how its document is cut.
//
// Item: 16 x i32
//   0 q_row   1 k_row    2 kv_head  3 k_token   batch rows; first token of the first tile, may be negative
//   4 tiles   5 key_low  6 key_high 7 own       the segment's keys, and row 0's own key, from k_token
//   8 left    9 right   10 head_0  11 head_1    keys seen left and right of the own one; heads of the groups
//  12 token_0 13 token_1 14 rows_0 15 rows_1    first query token and number of rows of each group
//   A third group continues the second one: 64 tokens further on, 64 rows less (rows_1 may exceed 64).
// lists: gridDim.x + 1 x i32, block b's items are lists[b] .. lists[b + 1]
// params: i64
//   0..2 strides of out by batch row, head, token   3, 4 strides of lse by batch row, head (in elements)
//   5 scale (bits of an f32)   6 softcap (bits of an f32)   7 columns of out

// Small heads leave registers for a third group, which hides more of the exponentials.
#if HEAD_DIM == 64 && V_HEAD_DIM == 64
#define GROUPS 3
#define STAGES 4
#define PRODUCER_REGISTERS 32
#define CONSUMER_REGISTERS 160
#else
#define GROUPS 2
#define STAGES 2
#define PRODUCER_REGISTERS 40
#define CONSUMER_REGISTERS 232
#endif
// Where registers are left, queries stay in them: less is read from shared memory, which at full power is clock. On an H200 2 % of the
// time of 16K tokens.
#define HOLDS_QUERIES (HEAD_DIM == 128 && V_HEAD_DIM <= 128)
#define TILE_Q (64 * GROUPS)
#if HEAD_DIM > 192
#define TILE_K 64
#else
#define TILE_K 128
#endif

#define RING 4
#define STAGE_OF(tile) ((tile) % STAGES)
#define PARITY_OF(tile) (((tile) / STAGES) & 1)
#define Q_PANEL (TILE_Q * 128)
#define K_PANEL (TILE_K * 128)
#define Q_BYTES (TILE_Q * HEAD_DIM * 2)
#define K_BYTES (TILE_K * HEAD_DIM * 2)
#define V_BYTES (TILE_K * V_HEAD_DIM * 2)

// Offsets in shared memory, from a multiple of 1024: the permutation repeats every 1024 bytes.
#define AT_Q 0
#define AT_K (AT_Q + Q_BYTES)
#define AT_V (AT_K + STAGES * K_BYTES)
#define AT_RING (AT_V + STAGES * V_BYTES)
#define AT_BARRIERS (AT_RING + RING * 64)

struct Barriers {
  u32 q_full, q_empty;        // one buffer of queries
  u32 k_full, k_empty;        // per stage, 8 bytes apart
  u32 v_full, v_empty;
  u32 v_landed;               // V tiles that warp 1 must clean before they count as full
  u32 ring_full, ring_empty;  // per slot
};

__device__ __forceinline__ Barriers barriers_at(u32 at) {
  Barriers b;
  b.q_full = at, b.q_empty = at + 8;
  b.ring_full = at + 16, b.ring_empty = b.ring_full + 8 * RING;
  b.k_full = b.ring_empty + 8 * RING, b.k_empty = b.k_full + 8 * STAGES;
  b.v_full = b.k_empty + 8 * STAGES, b.v_empty = b.v_full + 8 * STAGES;
  b.v_landed = b.v_empty + 8 * STAGES;
  return b;
}

#define CONSUMER_WARPS (4 * GROUPS)

__device__ __forceinline__ bool tile_is_partial(int tile, int key_low, int key_high) {
  return tile * TILE_K < key_low || (tile + 1) * TILE_K > key_high;
}

__device__ __forceinline__ void load_tiles(const TensorMap* tq, const TensorMap* tk, const TensorMap* tv, const int* items, int begin,
                                           int end, u32 base, const Barriers& bar, int lane) {
  u32 tile_count = 0, q_count = 0;
  int word = begin < end && lane < 16 ? items[(i64)begin * 16 + lane] : 0;
#pragma unroll 1
  for (int i = begin; i < end; i++) {
    const int slot = (i - begin) & (RING - 1), turn = (i - begin) / RING;
    barrier_wait(bar.ring_empty + 8 * slot, (turn & 1) ^ 1);
    if (lane < 16) store_shared1(base + AT_RING + slot * 64 + lane * 4, word);
    // The next item's words are on their way while this one's tiles are copied.
    const int next = i + 1 < end && lane < 16 ? items[(i64)(i + 1) * 16 + lane] : 0;
    // Every lane that wrote, or that read, arrives itself: items are rare, and no lane vouches for another.
    barrier_arrive(bar.ring_full + 8 * slot);
    __syncwarp();
    if (lane == 0) {
      const u32 item = base + AT_RING + slot * 64;
      const int4 keys = load_shared4(item + 16);
      if (keys.x > 0) {
        const int4 place = load_shared4(item);
        {
          const int4 heads = load_shared4(item + 32), rows = load_shared4(item + 48);
          barrier_wait(bar.q_empty, (q_count & 1) ^ 1);
          barrier_arrive_expecting(bar.q_full, Q_BYTES);
          copy_panels<HEAD_DIM>(base + AT_Q, Q_PANEL, tq, bar.q_full, heads.z, rows.x, place.x);
#pragma unroll
          for (int g = 1; g < GROUPS; g++)
            copy_panels<HEAD_DIM>(base + AT_Q + g * 8192, Q_PANEL, tq, bar.q_full, heads.w, rows.y + (g - 1) * 64, place.x);
        }
#pragma unroll 1
        for (int n = 0; n < keys.x; n++) {
          const u32 stage = STAGE_OF(tile_count + n), free = PARITY_OF(tile_count + n) ^ 1;
          const int token = place.w + n * TILE_K;
          barrier_wait(bar.k_empty + 8 * stage, free);
          barrier_arrive_expecting(bar.k_full + 8 * stage, K_BYTES);
          copy_panels<HEAD_DIM>(base + AT_K + stage * K_BYTES, K_PANEL, tk, bar.k_full + 8 * stage, place.z, token, place.y);
          barrier_wait(bar.v_empty + 8 * stage, free);
          const u32 landing = (tile_is_partial(n, keys.y, keys.z) ? bar.v_landed : bar.v_full) + 8 * stage;
          barrier_arrive_expecting(landing, V_BYTES);
          copy_panels<V_HEAD_DIM>(base + AT_V + stage * V_BYTES, K_PANEL, tv, landing, place.z, token, place.y);
        }
        tile_count += keys.x;
        q_count++;
      }
    }
    word = next;
  }
}

__device__ __forceinline__ void clean_tiles(int num_items, u32 base, const Barriers& bar, int lane) {
  u32 tile_count = 0;
  u32 landings = 0;  // parity of each stage's next landing, one bit per stage
  for (int i = 0; i < num_items; i++) {
    const int slot = i & (RING - 1);
    barrier_wait(bar.ring_full + 8 * slot, (i / RING) & 1);
    const int4 keys = load_shared4(base + AT_RING + slot * 64 + 16);
    barrier_arrive(bar.ring_empty + 8 * slot);
#pragma unroll 1
    for (int n = 0; n < keys.x; n++) {
      if (!tile_is_partial(n, keys.y, keys.z)) continue;
      const u32 stage = STAGE_OF(tile_count + n);
      barrier_wait(bar.v_landed + 8 * stage, (landings >> stage) & 1);
      landings ^= 1u << stage;
      const u32 tile = base + AT_V + stage * V_BYTES;
      zero_rows<V_HEAD_DIM>(tile, K_PANEL, 0, clamp_int(keys.y - n * TILE_K, 0, TILE_K), lane);
      zero_rows<V_HEAD_DIM>(tile, K_PANEL, clamp_int(keys.z - n * TILE_K, 0, TILE_K), TILE_K, lane);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(bar.v_full + 8 * stage);
    }
    tile_count += max(keys.x, 0);
  }
}

// Scores of keys outside [low, high) become -inf. Bounds are relative to this thread's first column.
__device__ __forceinline__ void mask_scores(float (&s)[TILE_K / 2], int low0, int high0, int low8, int high8) {
#pragma unroll
  for (int j = 0; j < TILE_K / 8; j++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const int key = j * 8 + e;
      if (key < low0 || key >= high0) s[4 * j + e] = NEG_INF;
      if (key < low8 || key >= high8) s[4 * j + 2 + e] = NEG_INF;
    }
  }
}

// The running maximum, sum and factor of one row.
struct Row {
  float max, sum, factor;
};

// Takes a tile's scores (columns `4 j + OFFSET`, `+ 1`) into the row: they become 2^((s - max) unit).
template <int OFFSET>
__device__ __forceinline__ void soften(float (&s)[TILE_K / 2], Row& row, float unit) {
  float top = row.max;
#pragma unroll
  for (int j = 0; j < TILE_K / 8; j++) top = fmaxf(top, fmaxf(s[4 * j + OFFSET], s[4 * j + OFFSET + 1]));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
  top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  // A row that has seen no key keeps -inf, and all its terms are 2^(-inf - 0) = 0.
  const float base = top == NEG_INF ? 0.0f : top;
  row.factor = exp2_fast((row.max - base) * unit);
  row.max = top;
  const float shift = -base * unit;
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < TILE_K / 8; j++) {
    s[4 * j + OFFSET] = exp2_fast(fmaf(s[4 * j + OFFSET], unit, shift));
    s[4 * j + OFFSET + 1] = exp2_fast(fmaf(s[4 * j + OFFSET + 1], unit, shift));
    sum += s[4 * j + OFFSET] + s[4 * j + OFFSET + 1];
  }
  row.sum = row.sum * row.factor + sum;
}

// The factor on the row's output, and its log-sum-exp (natural logarithm) over keys, without the sink.
__device__ __forceinline__ float finish_row(Row& row, float natural, float& lse, float sink) {
  row.sum += __shfl_xor_sync(~0u, row.sum, 1);
  row.sum += __shfl_xor_sync(~0u, row.sum, 2);
  if (!(row.max > NEG_INF)) {
    // NaN scores end here too if nothing else was seen; their sum is NaN and shows it.
    lse = row.sum != row.sum ? row.sum : NEG_INF;
    return row.sum != row.sum ? row.sum : 0.0f;
  }
  const float top = row.max * natural;
  lse = top + __logf(row.sum);
#if HAS_SINKS
  const float with_sink = fmaxf(top, sink);
  const float weight = exp2_fast((top - with_sink) * LOG2_E);
  return weight / (row.sum * weight + exp2_fast((sink - with_sink) * LOG2_E));
#else
  return 1.0f / row.sum;
#endif
}

__device__ __forceinline__ void attend(int num_items, u32 base, const Barriers& bar, int group, const i64* params, const float* sinks,
                                       half_bits* out, float* lse) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int row = (thread >> 5) * 16 + (lane >> 2);  // and row + 8
  const float scale = __int_as_float((int)params[5]);
#if HAS_SOFTCAP
  const float cap = __int_as_float((int)params[6]), per_cap = scale / cap, unit = LOG2_E, natural = 1.0f;
#else
  const float unit = scale * LOG2_E, natural = scale;
#endif
#if HOLDS_QUERIES
  u32 q[HEAD_DIM / 4];
#else
  const u32 dq = descriptor(base + AT_Q + group * 8192, 0);
#endif
  const u32 dk = descriptor(base + AT_K, 0);
  const u32 dv = descriptor(base + AT_V, K_PANEL);
  float o[V_HEAD_DIM / 2], s[TILE_K / 2];
  u32 p[TILE_K / 4];
#pragma unroll
  for (int i = 0; i < TILE_K / 2; i++) s[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < TILE_K / 4; i++) p[i] = 0;
  u32 tile_count = 0, q_count = 0;

  for (int i = 0; i < num_items; i++) {
    const int slot = i & (RING - 1);
    barrier_wait(bar.ring_full + 8 * slot, (i / RING) & 1);
    const u32 item = base + AT_RING + slot * 64;
    const int q_row = load_shared1(item), tiles = load_shared1(item + 16);
    const int key_low = load_shared1(item + 20), key_high = load_shared1(item + 24);
    const int left = load_shared1(item + 32), right = load_shared1(item + 36);
    const int second = min(group, 1), further = 64 * (group - second);
    const int head = load_shared1(item + 40 + 4 * second), token = load_shared1(item + 48 + 4 * second) + further;
    const int rows = load_shared1(item + 56 + 4 * second) - further;
    const int own = load_shared1(item + 28) + token - load_shared1(item + 48);  // of the group's first row
    barrier_arrive(bar.ring_empty + 8 * slot);

    // Where this thread's two rows begin and end to see keys, less the column that the thread starts with.
    const int column = (lane & 3) * 2;
    const int low0 = max(key_low, own + row - left) - column, high0 = min(key_high, own + row + right + 1) - column;
    const int low8 = max(key_low, own + row + 8 - left) - column, high8 = min(key_high, own + row + 9 + right) - column;
    // Tiles within these bounds are seen whole by all 64 rows.
    const int whole_low = max(key_low, own + 63 - left), whole_high = min(key_high, own + right + 1);

    Row r0 = {NEG_INF, 0.0f, 1.0f}, r8 = {NEG_INF, 0.0f, 1.0f};
#pragma unroll
    for (int j = 0; j < V_HEAD_DIM / 2; j++) o[j] = 0.0f;
    if (tiles > 0) barrier_wait(bar.q_full, q_count & 1);
#if HOLDS_QUERIES
    if (tiles > 0) {
      const int line = (thread >> 5) * 16 + (lane & 15);
      const u32 at = base + AT_Q + group * 8192 + line * 128;
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; k++)
        load_matrices(q + 4 * k, at + (k / 4) * Q_PANEL + (((k % 4 * 2 + (lane >> 4)) ^ (line & 7)) << 4));
      __syncwarp();
      if (lane == 0) barrier_arrive(bar.q_empty);
    }
#endif

    for (int n = 0; n < tiles; n++, tile_count++) {
      const u32 stage = STAGE_OF(tile_count), other = STAGE_OF(tile_count - 1);
      barrier_wait(bar.k_full + 8 * stage, PARITY_OF(tile_count));
      pin(s), pin(o);
      products_fence();
#pragma unroll
      for (int k = 0; k < HEAD_DIM / 16; k++) {
        const u32 keys = dk + stage * (K_BYTES >> 4) + step_along_k(k, K_PANEL);
#if HOLDS_QUERIES
        Registers<TILE_K, 0>::run(s, q + 4 * k, keys, k > 0);
#else
        Shared<TILE_K, 0, 0>::run(s, dq + step_along_k(k, Q_PANEL), keys, k > 0);
#endif
      }
      products_commit();
      if (n > 0) {
        barrier_wait(bar.v_full + 8 * other, PARITY_OF(tile_count - 1));
#pragma unroll
        for (int k = 0; k < TILE_K / 16; k++)
          Registers<V_HEAD_DIM, 1>::run(o, p + 4 * k, dv + other * (V_BYTES >> 4) + step_along_n(k), 1);
        products_commit();
        products_wait<1>();
      } else {
        products_wait<0>();
      }
      pin(s);
#if HOLDS_QUERIES
      pin(q);
#endif
      // One arrival per warp: a warp knows only of its own reads that they are done.
      if (lane == 0) {
        barrier_arrive(bar.k_empty + 8 * stage);
#if !HOLDS_QUERIES
        if (n == tiles - 1) barrier_arrive(bar.q_empty);
#endif
      }
#if HAS_SOFTCAP
#pragma unroll
      for (int j = 0; j < TILE_K / 2; j++) s[j] = cap * tanh_fast(s[j] * per_cap);
#endif
      const int first = n * TILE_K;
      if (first < whole_low || first + TILE_K > whole_high) mask_scores(s, low0 - first, high0 - first, low8 - first, high8 - first);
      soften<0>(s, r0, unit);
      soften<2>(s, r8, unit);

      products_wait<0>();
      pin(o), pin(p);
      if (n > 0 && lane == 0) barrier_arrive(bar.v_empty + 8 * other);
      // A factor of 1 changes no bit, so skipping it where no row of the warp needs one does not either.
      if (__any_sync(~0u, r0.factor != 1.0f || r8.factor != 1.0f)) {
#pragma unroll
        for (int j = 0; j < V_HEAD_DIM / 8; j++) {
          o[4 * j] *= r0.factor, o[4 * j + 1] *= r0.factor;
          o[4 * j + 2] *= r8.factor, o[4 * j + 3] *= r8.factor;
        }
      }
#pragma unroll
      for (int j = 0; j < TILE_K / 4; j++) p[j] = pack2(s[2 * j], s[2 * j + 1]);
    }

    if (tiles > 0) {
      const u32 last = tile_count - 1, stage = STAGE_OF(last);
      barrier_wait(bar.v_full + 8 * stage, PARITY_OF(last));
      pin(o);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_K / 16; k++)
        Registers<V_HEAD_DIM, 1>::run(o, p + 4 * k, dv + stage * (V_BYTES >> 4) + step_along_n(k), 1);
      products_commit();
      products_wait<0>();
      pin(o), pin(p);
      if (lane == 0) barrier_arrive(bar.v_empty + 8 * stage);
      q_count++;
    }

    float sink = 0.0f;
#if HAS_SINKS
    sink = sinks[head];
#endif
    float lse0, lse8;
    const float f0 = finish_row(r0, natural, lse0, sink), f8 = finish_row(r8, natural, lse8, sink);
    half_bits* to = out + q_row * params[0] + head * params[1] + (i64)(token + row) * params[2];
    store_rows<V_HEAD_DIM>(o, to, to + 8 * params[2], (int)params[7], f0, f8, row < rows, row + 8 < rows, lane);
    if ((lane & 3) == 0) {
      float* at = lse + q_row * params[3] + head * params[4] + token + row;
      if (row < rows) at[0] = lse0;
      if (row + 8 < rows) at[8] = lse8;
    }
  }
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
    attention_forward(const __grid_constant__ TensorMap tq, const __grid_constant__ TensorMap tk, const __grid_constant__ TensorMap tv,
                      const void*, const void*, const void*, const int* __restrict__ items, const int* __restrict__ lists,
                      const i64* __restrict__ params, const float* __restrict__ sinks, half_bits* __restrict__ out,
                      float* __restrict__ lse) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const u32 base = (shared_address(shared_bytes) + 1023) & ~1023u;
  const Barriers bar = barriers_at(base + AT_BARRIERS);
  const int begin = lists[blockIdx.x], end = lists[blockIdx.x + 1];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7;
  if (threadIdx.x == 0) {
    barrier_init(bar.q_full, 1), barrier_init(bar.q_empty, CONSUMER_WARPS);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(bar.k_full + 8 * i, 1), barrier_init(bar.k_empty + 8 * i, CONSUMER_WARPS);
      barrier_init(bar.v_full + 8 * i, 1), barrier_init(bar.v_empty + 8 * i, CONSUMER_WARPS);
      barrier_init(bar.v_landed + 8 * i, 1);
    }
    for (int i = 0; i < RING; i++) barrier_init(bar.ring_full + 8 * i, 32), barrier_init(bar.ring_empty + 8 * i, 32 * (CONSUMER_WARPS + 1));
    barrier_init_done();
    prefetch_map(&tq), prefetch_map(&tk), prefetch_map(&tv);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<PRODUCER_REGISTERS>();
    if (warp == 0) load_tiles(&tq, &tk, &tv, items, begin, end, base, bar, lane);
    if (warp == 1) clean_tiles(end - begin, base, bar, lane);
  } else {
    take_registers<CONSUMER_REGISTERS>();
    attend(end - begin, base, bar, warpgroup - 1, params, sinks, out, lse);
  }
}

// What comes before and after the backward pass over the pairs, each a pass over memory.
//
// q_tiles: 4 x i32 per tile of queries: q_row, q_token, rows, unused
// params: i64
//   0..2 strides of out by batch row, head, token   3..5 of dout   6, 7 of lse by batch row, head
//   8..10 of dq   11 scale (bits of an f32)   12 query heads   13 tiles of queries
//   14, 15 columns of dq and of out

#if HEAD_DIM == 64
#define TILE_Q 128
#else
#define TILE_Q 64
#endif

// Per tile and head: TILE_Q log-sum-exps in units of log 2, over keys and the sink, then TILE_Q row sums of
// dout * out. Rows that see no key, and rows past the tile's end, get a log-sum-exp that makes their
// probabilities 0. Also sets the turns of dQ's shares and the count of claimed items to 0.
// Grid: tiles x heads (heads next to each other), 128 threads.
extern "C" __global__ void __launch_bounds__(128)
    attention_backward_begin(const int4* __restrict__ q_tiles, const i64* __restrict__ params, const half_bits* __restrict__ out,
                             const half_bits* __restrict__ dout, const float* __restrict__ lse, const float* __restrict__ sinks,
                             float* __restrict__ stats, u32* __restrict__ turns) {
  const int heads = (int)params[12], tiles = (int)params[13];
  const int tile = blockIdx.x / heads, head = blockIdx.x % heads;
  const int4 place = q_tiles[tile];
  constexpr int LANES = V_HEAD_DIM / 8, ROWS = 128 / LANES;  // 16 bytes a lane
  const int lane = threadIdx.x % LANES;
  const bool in_columns = lane * 8 < params[15];
  float* const to = stats + ((i64)head * tiles + tile) * (2 * TILE_Q);
  const half_bits* o = out + place.x * params[0] + head * params[1] + (i64)place.y * params[2] + lane * 8;
  const half_bits* g = dout + place.x * params[3] + head * params[4] + (i64)place.y * params[5] + lane * 8;
  const float* l = lse + place.x * params[6] + head * params[7] + place.y;
  const i64 o_stride = params[2], g_stride = params[5];
  if (threadIdx.x == 0) {
    turns[32 + (i64)head * tiles + tile] = 0;
    if (blockIdx.x == 0) turns[0] = 0;
  }
#pragma unroll 4
  for (int row = threadIdx.x / LANES; row < TILE_Q; row += ROWS) {
    float sum = 0.0f;
    const bool inside = row < place.z;
    if (inside && in_columns) {
      const uint4 a = *(const uint4*)(o + row * o_stride), b = *(const uint4*)(g + row * g_stride);
      sum = low_of(a.x) * low_of(b.x) + high_of(a.x) * high_of(b.x);
      sum += low_of(a.y) * low_of(b.y) + high_of(a.y) * high_of(b.y);
      sum += low_of(a.z) * low_of(b.z) + high_of(a.z) * high_of(b.z);
      sum += low_of(a.w) * low_of(b.w) + high_of(a.w) * high_of(b.w);
    }
#pragma unroll
    for (int away = LANES / 2; away > 0; away /= 2) sum += __shfl_xor_sync(~0u, sum, away);
    if (lane == 0) {
      const float x = inside ? l[row] : NEG_INF;
      const bool blind = x == NEG_INF;
#if HAS_SINKS
      const float sink = sinks[head], top = fmaxf(x, sink);
      const float total = top + __logf(exp2_fast((x - top) * LOG2_E) + exp2_fast((sink - top) * LOG2_E));
#else
      const float total = x;
#endif
      to[row] = blind ? 1e30f : total * LOG2_E;
      to[TILE_Q + row] = blind ? 0.0f : sum;
    }
  }
}

// One warpgroup's part of a tile of dQ: COLUMNS columns from `column` on, of 64 rows from `first_row` on.
template <int COLUMNS>
__device__ __forceinline__ void finish_part(const int4 place, const i64* params, const float* from, bool any, half_bits* dq, int head,
                                            int first_row, int column) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const float scale = __int_as_float((int)params[11]);
  float d[COLUMNS / 2];
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; j++) {
    const float4 x = any ? ((const float4*)from)[j * 128 + thread] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    d[4 * j] = x.x, d[4 * j + 1] = x.y, d[4 * j + 2] = x.z, d[4 * j + 3] = x.w;
  }
  const int row = first_row + (thread >> 5) * 16 + (lane >> 2);
  half_bits* to = dq + place.x * params[8] + head * params[9] + (i64)(place.y + row) * params[10] + column;
  store_rows<COLUMNS>(d, to, to + 8 * params[10], (int)params[14] - column, scale, scale, row < place.z, row + 8 < place.z, lane);
}

// dQ from the f32 shares, which lie as the accumulators of two warpgroups did. A tile without a share saw no
// key: its rows are 0. Grid: tiles x heads (heads next to each other), 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_end(const int4* __restrict__ q_tiles, const i64* __restrict__ params, const float* __restrict__ shares,
                           const u32* __restrict__ turns, half_bits* __restrict__ dq) {
  const int heads = (int)params[12], tiles = (int)params[13];
  const int tile = blockIdx.x / heads, head = blockIdx.x % heads;
  const int4 place = q_tiles[tile];
  const i64 target = (i64)head * tiles + tile;
  const int group = threadIdx.x >> 7;
  const float* from = shares + target * (TILE_Q * HEAD_DIM);
  const bool any = turns[32 + target] != 0;
#if TILE_Q == 128
  finish_part<HEAD_DIM>(place, params, from + group * 64 * HEAD_DIM, any, dq, head, group * 64, 0);
#elif HEAD_DIM == 192
  // The second warpgroup has two of the three panels.
  if (group == 0)
    finish_part<64>(place, params, from, any, dq, head, 0, 0);
  else
    finish_part<128>(place, params, from + 64 * 64, any, dq, head, 0, 64);
#else
  finish_part<HEAD_DIM / 2>(place, params, from + group * 32 * HEAD_DIM, any, dq, head, 0, group * HEAD_DIM / 2);
#endif
}

// Gradient of each head's sink: -sum over rows of its probability * rowsum(dout * out), in a fixed order.
// Grid: heads, 256 threads.
extern "C" __global__ void __launch_bounds__(256)
    attention_backward_sinks(const i64* __restrict__ params, const float* __restrict__ stats, const float* __restrict__ sinks,
                             float* __restrict__ dsinks) {
  __shared__ float part[256];
  const int head = blockIdx.x;
  const i64 tiles = params[13];
  const float* from = stats + head * tiles * (2 * TILE_Q);
  const float sink = sinks[head] * LOG2_E;
  float sum = 0.0f;
  for (i64 i = threadIdx.x; i < tiles * TILE_Q; i += 256) {
    const float* at = from + i / TILE_Q * (2 * TILE_Q) + i % TILE_Q;
    sum += exp2_fast(sink - at[0]) * at[TILE_Q];
  }
  part[threadIdx.x] = sum;
  __syncthreads();
  for (int away = 128; away > 0; away /= 2) {
    if (threadIdx.x < away) part[threadIdx.x] += part[threadIdx.x + away];
    __syncthreads();
  }
  if (threadIdx.x == 0) dsinks[head] = -part[0];
}

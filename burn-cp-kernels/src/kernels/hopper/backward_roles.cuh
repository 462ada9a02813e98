// Attention backward: gradients of queries, keys and values in one pass over the visible pairs. This file
// holds what all head dims share: the plan of shared memory and the roles that move data. The products are in
// backward.cu (head dims up to 128) and backward_wide.cu (192 and 256).
//
// An item is a tile of TILE_K keys of one key head. Its block walks over the tiles of queries that see it, for
// each query head that shares the key head, and keeps the gradients of its keys and values in registers: no
// other block adds to them. Scores are computed transposed (keys x queries), so that the transposed
// probabilities and their gradients are at once the left factors of the products for dV and dK.
//
// A tile of queries gets one share of its gradient from each tile of keys that it sees, so from several
// blocks. Each share is added to an f32 buffer by the copy engine when its turn has come: the turns of a
// tile of queries are counted in `turns`, the order is fixed by the problem alone, and no two blocks add to
// the same tile at a time. So the sums have one order, and repeated launches give the same bits.
// Items are claimed in list order, and a share only ever waits for shares of items earlier in the list:
// whatever number of blocks is resident, the earliest unfinished item can go on.
//
// Roles: warp 0 claims items, walks over their steps and starts the copies; warp 1 zeros rows of tiles that
// lie outside their segment; warps 2 (and 3) send the shares out; warpgroups 1 and 2 compute.
//
// Item: 16 x i32
//   0 k_row    1 k_token    batch row and first token of the tile, may be negative
//   2 row_low  3 row_high   rows of the tile that are keys of the run
//   4 kv_head  5 steps      tiles of queries over all visits and heads
//   6, 7 visits, half-open  8 turn_low 9 turn_high  the tiles of the item's turn group, relative to this one
//  10 rising   1: the group's tiles take their turns in ascending order, 0: descending
// Visit: 16 x i32, a run of tiles of queries of one segment
//   0 q_row    1 q_token    2 tiles   3 rows        rows of the segment from q_token on
//   4 own      5 key_low    6 key_high 7 left 8 right  row 0's own key and the segment's keys, from k_token
//   9 q_tile                index of the first tile of queries among all
// params: i64
//   0..2 strides of dk by batch row, head, token   3..5 of dv
//   6 scale, 7 softcap (bits of an f32)   8 number of items   9 query heads per key head   10 tiles of queries
//   11, 12 columns of dk and dv

#if HEAD_DIM == 64
// 128 queries a step where the registers hold them: fewer, larger steps.
#define TILE_Q 128
#define TILE_K 128
#elif HEAD_DIM <= 128
#define TILE_Q 64
#define TILE_K 128
#else
#define TILE_Q 64
#define TILE_K 64
#endif

// Stages of queries, and buffers for shares on their way: with two, one may wait for its turn while the next
// one is computed. Shared memory does not hold two of everything at the largest head dims.
#define STAGES (HEAD_DIM > 192 ? 1 : 2)
#define DQ_BUFFERS (HEAD_DIM > 128 ? 1 : 2)
#define RING 2
// Records of steps. The walk is at most STAGES steps ahead of the consumers and these DQ_BUFFERS + 1 ahead of
// the sender, so a ring of eight needs no barrier of its own.
#define STEPS 8
#define STAGE_OF(step) ((step) % STAGES)
#define PARITY_OF(step) (((step) / STAGES) & 1)
#define Q_PANEL (TILE_Q * 128)
#define K_PANEL (TILE_K * 128)
#define Q_BYTES (TILE_Q * HEAD_DIM * 2)
#define O_BYTES (TILE_Q * V_HEAD_DIM * 2)
#define K_BYTES (TILE_K * HEAD_DIM * 2)
#define V_BYTES (TILE_K * V_HEAD_DIM * 2)
#define DS_BYTES (TILE_K * TILE_Q * 2)
#define DQ_BYTES (TILE_Q * HEAD_DIM * 4)
#define STATS_BYTES (TILE_Q * 8)
#define STEP_BYTES 32

#define AT_K 0
#define AT_V (AT_K + K_BYTES)
#define AT_Q (AT_V + V_BYTES)
#define AT_O (AT_Q + STAGES * Q_BYTES)
// Two buffers: one warpgroup may still read the last step's while the other writes this step's.
#define AT_DS (AT_O + STAGES * O_BYTES)
#if HEAD_DIM > 128
#define AT_P (AT_DS + 2 * DS_BYTES)
#define AT_DQ (AT_P + 2 * DS_BYTES)
#else
#define AT_DQ (AT_DS + 2 * DS_BYTES)
#endif
#define AT_STATS (AT_DQ + DQ_BUFFERS * DQ_BYTES)
#define AT_STEPS (AT_STATS + STAGES * STATS_BYTES)
#define AT_RING (AT_STEPS + STEPS * STEP_BYTES)
#define AT_BARRIERS (AT_RING + RING * 64)

#define CONSUMER_WARPS 8

struct Barriers {
  u32 kv_full, kv_empty, kv_landed;
  u32 q_full, o_full, q_landed, step_empty;  // per stage
  u32 ring_full, ring_empty;  // per slot
  u32 dq_full, dq_empty;      // per buffer of shares
};

__device__ __forceinline__ Barriers barriers_at(u32 at) {
  Barriers b;
  b.kv_full = at, b.kv_empty = at + 8, b.kv_landed = at + 16;
  b.ring_full = at + 24, b.ring_empty = at + 40;
  b.dq_full = at + 56, b.dq_empty = at + 72;
  b.q_full = at + 88, b.o_full = b.q_full + 8 * STAGES, b.q_landed = b.o_full + 8 * STAGES, b.step_empty = b.q_landed + 8 * STAGES;
  return b;
}

struct Buffers {
  const int* items;
  const int* visits;
  const i64* params;
  const float* stats;
  u32* ticket;
  u32* turns;
  float* dq;
  half_bits* dk;
  half_bits* dv;
};

// The turn of this tile's share among those of a tile of queries that sees keys low .. high (inclusive,
// relative to this tile's first). Groups of tiles come in ascending order; within a group the order is the
// one in which the list has its items. Blocks that start a falling group together reach a tile of queries
// one after the other, the nearest to the diagonal first, and end one after the other; blocks that start
// one after the other are best served longest item first, by a rising group.
__device__ __forceinline__ int turn_of(int low, int high, int turn_low, int turn_high, int rising) {
  constexpr int SHIFT = TILE_K == 128 ? 7 : 6;
  const int first = low >> SHIFT, last = high >> SHIFT;  // tiles relative to this one, rounded down
  if (rising) return -first;
  return max(turn_low, first) - first + min(turn_high, last);
}

// Gradients of an item's keys become 0. `word` is the item, a word a lane.
__device__ __forceinline__ void zero_gradients(const Buffers& buf, int word, int lane) {
  const int k_row = __shfl_sync(~0u, word, 0), k_token = __shfl_sync(~0u, word, 1), kv_head = __shfl_sync(~0u, word, 4);
  const int low = __shfl_sync(~0u, word, 2), high = __shfl_sync(~0u, word, 3);
  const i64* stride = buf.params;
#pragma unroll 1
  for (int row = low; row < high; row++) {
    half_bits* k = buf.dk + k_row * stride[0] + kv_head * stride[1] + (i64)(k_token + row) * stride[2];
    half_bits* v = buf.dv + k_row * stride[3] + kv_head * stride[4] + (i64)(k_token + row) * stride[5];
    if (lane * 8 < stride[11]) *(uint4*)(k + lane * 8) = make_uint4(0, 0, 0, 0);
    if (lane * 8 < stride[12]) *(uint4*)(v + lane * 8) = make_uint4(0, 0, 0, 0);
  }
}

__device__ __forceinline__ void load_tiles(const TensorMap* tq, const TensorMap* tk, const TensorMap* tv, const TensorMap* to,
                                           const Buffers& buf, u32 base, const Barriers& bar, int lane) {
  int step_count = 0;
  const u32 num_items = (u32)buf.params[8];
  const int heads = (int)buf.params[9], q_tiles = (int)buf.params[10];
#pragma unroll 1
  for (int i = 0;; i++) {
    const int slot = i & (RING - 1);
    u32 ticket;
    int word;
    while (true) {
      ticket = lane == 0 ? atomicAdd(buf.ticket, 1) : 0;
      ticket = __shfl_sync(~0u, ticket, 0);
      // Beyond the last item: steps of -1 stop everybody.
      word = -1;
      if (ticket < num_items && lane < 16) word = buf.items[(i64)ticket * 16 + lane];
      if (__shfl_sync(~0u, word, 5) != 0) break;
      // Keys that nobody sees need no other role.
      zero_gradients(buf, word, lane);
    }
    barrier_wait(bar.ring_empty + 8 * slot, ((i / RING) & 1) ^ 1);
    const u32 item = base + AT_RING + slot * 64;
    if (lane < 16) store_shared1(item + lane * 4, word);
    // Every lane that wrote, or that read, arrives itself: items are rare, and no lane vouches for another.
    barrier_arrive(bar.ring_full + 8 * slot);
    __syncwarp();
    if (ticket >= num_items) return;
    if (lane == 0) {
      bool keys_wait = true;
#pragma unroll 1
      for (int visit = load_shared1(item + 24); visit < load_shared1(item + 28); visit++) {
        const int4* at = (const int4*)(buf.visits + (i64)visit * 16);
        const int4 q = at[0], keys = at[1], more = at[2];
#pragma unroll 1
        for (int h = 0; h < heads; h++) {
          const int head = load_shared1(item + 16) * heads + h;
#pragma unroll 1
          for (int t = 0; t < q.z; t++, step_count++) {
            const int stage = STAGE_OF(step_count);
            const int token = q.y + t * TILE_Q, rows = min(q.w - t * TILE_Q, TILE_Q), own = keys.x + t * TILE_Q;
            barrier_wait(bar.step_empty + 8 * stage, PARITY_OF(step_count) ^ 1);
            const u32 step = base + AT_STEPS + (step_count & (STEPS - 1)) * STEP_BYTES;
            const int target = head * q_tiles + more.y + t;
            store_shared4(step, own + more.x, own - keys.w, keys.y, keys.z);
            store_shared1(step + 16, own + rows - 1 + more.x);
            store_shared1(step + 20, target);
            const bool whole = rows == TILE_Q;
            const u32 q_bar = (whole ? bar.q_full : bar.q_landed) + 8 * stage, o_bar = (whole ? bar.o_full : bar.q_landed) + 8 * stage;
            if (whole) {
              barrier_arrive_expecting(q_bar, Q_BYTES + STATS_BYTES);
            } else {
              barrier_expect(bar.q_full + 8 * stage, STATS_BYTES);  // nothing to clean in these
              barrier_arrive_expecting(q_bar, Q_BYTES + O_BYTES);
            }
            copy_panels<HEAD_DIM>(base + AT_Q + stage * Q_BYTES, Q_PANEL, tq, q_bar, head, token, q.x);
#if TILE_Q == 128
            copy_panels<HEAD_DIM>(base + AT_Q + stage * Q_BYTES + 8192, Q_PANEL, tq, q_bar, head, token + 64, q.x);
#endif
            copy_bytes_in(base + AT_STATS + stage * STATS_BYTES, buf.stats + (i64)target * (2 * TILE_Q), STATS_BYTES, bar.q_full + 8 * stage);
            if (whole) barrier_arrive_expecting(o_bar, O_BYTES);
            copy_panels<V_HEAD_DIM>(base + AT_O + stage * O_BYTES, Q_PANEL, to, o_bar, head, token, q.x);
#if TILE_Q == 128
            copy_panels<V_HEAD_DIM>(base + AT_O + stage * O_BYTES + 8192, Q_PANEL, to, o_bar, head, token + 64, q.x);
#endif
            // The keys come after the first queries: their buffer is in use until the last item is done,
            // that of the queries is not.
            if (keys_wait) {
              keys_wait = false;
              const int4 place = load_shared4(item);
              const u32 k_bar = place.z > 0 || place.w < TILE_K ? bar.kv_landed : bar.kv_full;
              const int kv_head = load_shared1(item + 16);
              barrier_wait(bar.kv_empty, (i & 1) ^ 1);
              barrier_arrive_expecting(k_bar, K_BYTES + V_BYTES);
              copy_panels<HEAD_DIM>(base + AT_K, K_PANEL, tk, k_bar, kv_head, place.y, place.x);
              copy_panels<V_HEAD_DIM>(base + AT_V, K_PANEL, tv, k_bar, kv_head, place.y, place.x);
            }
          }
        }
      }
    }
    __syncwarp();
  }
}

// Zeros what lies outside: with zeros in both factors, scores, their gradients and all products stay finite
// whatever the neighbours hold.
__device__ __forceinline__ void clean_tiles(const Buffers& buf, u32 base, const Barriers& bar, int lane) {
  const int heads = (int)buf.params[9];
  int step_count = 0;
  u32 key_landings = 0, landings = 0;
#pragma unroll 1
  for (int i = 0;; i++) {
    const int slot = i & (RING - 1);
    barrier_wait(bar.ring_full + 8 * slot, (i / RING) & 1);
    const u32 item = base + AT_RING + slot * 64;
    const int low = load_shared1(item + 8), high = load_shared1(item + 12), steps = load_shared1(item + 20);
    const int visit_begin = load_shared1(item + 24), visit_end = load_shared1(item + 28);
    barrier_arrive(bar.ring_empty + 8 * slot);
    if (steps < 0) return;
    if (low > 0 || high < TILE_K) {
      barrier_wait(bar.kv_landed, key_landings & 1);
      key_landings++;
      zero_rows<HEAD_DIM>(base + AT_K, K_PANEL, 0, low, lane), zero_rows<HEAD_DIM>(base + AT_K, K_PANEL, high, TILE_K, lane);
      zero_rows<V_HEAD_DIM>(base + AT_V, K_PANEL, 0, low, lane), zero_rows<V_HEAD_DIM>(base + AT_V, K_PANEL, high, TILE_K, lane);
      fence_async_shared();
      __syncwarp();
      if (lane == 0) barrier_arrive(bar.kv_full);
    }
#pragma unroll 1
    for (int visit = visit_begin; visit < visit_end; visit++) {
      const int tiles = buf.visits[(i64)visit * 16 + 2], rows = buf.visits[(i64)visit * 16 + 3] - (tiles - 1) * TILE_Q;
#pragma unroll 1
      for (int h = 0; h < heads; h++) {
        step_count += tiles;
        if (rows >= TILE_Q) continue;
        const int stage = STAGE_OF(step_count - 1);
        barrier_wait(bar.q_landed + 8 * stage, (landings >> stage) & 1);
        landings ^= 1u << stage;
        zero_rows<HEAD_DIM>(base + AT_Q + stage * Q_BYTES, Q_PANEL, rows, TILE_Q, lane);
        zero_rows<V_HEAD_DIM>(base + AT_O + stage * O_BYTES, Q_PANEL, rows, TILE_Q, lane);
        fence_async_shared();
        __syncwarp();
        if (lane == 0) barrier_arrive(bar.q_full + 8 * stage), barrier_arrive(bar.o_full + 8 * stage);
      }
    }
  }
}

// Sends every second share of dQ out, those of one buffer, each in its turn. Two warps do this: a share takes
// longer from its turn to the next one's than a step takes. The first share of a tile overwrites, so that
// nobody has to zero the buffer.
//
// A turn is handed on by release and acquire. No proxy fence stands between them: `copies_out_done` makes the
// copy engine's writes visible to the thread that releases, and the next share is added where they lie, in L2,
// after they are complete. It would cost more than the hand-over itself.
__device__ __forceinline__ void send_shares(const Buffers& buf, u32 base, const Barriers& bar, int buffer, int lane) {
  int step_count = 0;
  const u32 share = base + AT_DQ + buffer * DQ_BYTES;
#pragma unroll 1
  for (int i = 0;; i++) {
    const int slot = i & (RING - 1);
    barrier_wait(bar.ring_full + 8 * slot, (i / RING) & 1);
    const u32 item = base + AT_RING + slot * 64;
    const int steps = load_shared1(item + 20), turn_low = load_shared1(item + 32), turn_high = load_shared1(item + 36);
    const int rising = load_shared1(item + 40);
    barrier_arrive(bar.ring_empty + 8 * slot);
    if (steps < 0) return;
    if (lane != 0) continue;
    const int end = step_count + steps;
#pragma unroll 1
    for (; step_count < end; step_count++) {
      if (step_count % DQ_BUFFERS != buffer) continue;
      barrier_wait(bar.dq_full + 8 * buffer, (step_count / DQ_BUFFERS) & 1);
      const u32 step = base + AT_STEPS + (step_count & (STEPS - 1)) * STEP_BYTES;
      const int4 seen = load_shared4(step);
      const u32 turn = turn_of(max(seen.z, seen.y), min(seen.w - 1, load_shared1(step + 16)), turn_low, turn_high, rising);
      const int target = load_shared1(step + 20);
      u32* const turns = buf.turns + target;
      float* const to = buf.dq + (i64)target * (TILE_Q * HEAD_DIM);
      if (turn == 0) {
        copy_bytes_out(to, share, DQ_BYTES);
      } else {
        u32 now;
#ifdef POLL_LIMIT
        u32 polls = 0;
#endif
        do {
          asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
#ifdef POLL_LIMIT
          if (++polls > POLL_LIMIT) __trap();
#endif
        } while (now != turn);
        add_floats_out(to, share, DQ_BYTES);
      }
      copies_out_commit();
      copies_out_read();
      barrier_arrive(bar.dq_empty + 8 * buffer);
      copies_out_done();
      asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turns), "r"(turn + 1) : "memory");
    }
  }
}

// The products: one of the two files that follow.
__device__ __forceinline__ void differentiate(const Buffers& buf, u32 base, const Barriers& bar, int group);

extern "C" __global__ void __launch_bounds__(384, 1)
    attention_backward(const __grid_constant__ TensorMap tq, const __grid_constant__ TensorMap tk, const __grid_constant__ TensorMap tv,
                       const __grid_constant__ TensorMap to, const void*, const void*, const void*, const void*,
                       const int* __restrict__ items, const int* __restrict__ visits, const i64* __restrict__ params,
                       const float* __restrict__ stats, u32* turns, float* dq, half_bits* dk, half_bits* dv) {
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  // No rounding up: shared memory is full to the last kilobyte. Dynamic shared memory starts on 1024 as long
  // as there is no static one.
  const u32 base = shared_address(shared_bytes);
  if (base & 1023) __trap();
  const Barriers bar = barriers_at(base + AT_BARRIERS);
  // turns[0] counts claimed items; the tiles' turns start after 128 bytes.
  const Buffers buf = {items, visits, params, stats, turns, turns + 32, dq, dk, dv};
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  // Through a shuffle, so that the compiler sees the same value in all lanes.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x >> 7, 0);
  if (threadIdx.x == 0) {
    barrier_init(bar.kv_full, 1), barrier_init(bar.kv_landed, 1), barrier_init(bar.kv_empty, CONSUMER_WARPS);
    for (int i = 0; i < DQ_BUFFERS; i++) barrier_init(bar.dq_full + 8 * i, CONSUMER_WARPS), barrier_init(bar.dq_empty + 8 * i, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(bar.q_full + 8 * i, 1), barrier_init(bar.o_full + 8 * i, 1), barrier_init(bar.q_landed + 8 * i, 1);
      barrier_init(bar.step_empty + 8 * i, 32 * CONSUMER_WARPS);
    }
    for (int i = 0; i < RING; i++) barrier_init(bar.ring_full + 8 * i, 32), barrier_init(bar.ring_empty + 8 * i, 32 * (CONSUMER_WARPS + 1 + DQ_BUFFERS));
    barrier_init_done();
    prefetch_map(&tq), prefetch_map(&tk), prefetch_map(&tv), prefetch_map(&to);
  }
  __syncthreads();
  if (warpgroup == 0) {
    give_registers<40>();
    if (warp == 0) load_tiles(&tq, &tk, &tv, &to, buf, base, bar, lane);
    if (warp == 1) clean_tiles(buf, base, bar, lane);
    if (warp >= 2 && warp < 2 + DQ_BUFFERS) send_shares(buf, base, bar, warp - 2, lane);
  } else {
    take_registers<232>();
    differentiate(buf, base, bar, warpgroup - 1);
  }
}

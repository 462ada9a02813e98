// Attention backward: gradients of queries, keys and values in one pass over the visible pairs.
//
// An item is a tile of 128 keys of one key head. Its block walks over the tiles of queries that see it, for
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
// lie outside their segment; warps 2 and 3 send the shares out; warpgroups 1 and 2 each own 64 keys of the tile.
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

// 128 queries a step where the registers hold them: fewer, larger steps.
#if HEAD_DIM == 64
#define TILE_Q 128
#else
#define TILE_Q 64
#endif
#define TILE_K 128
#ifndef PACKED_P
#define PACKED_P 1
#endif

#ifndef STAGES
#define STAGES 2
#endif
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
// Two buffers for shares on their way: one may wait for its turn while the next one is computed.
#ifndef DQ_BUFFERS
#define DQ_BUFFERS 2
#endif
#define STATS_BYTES (TILE_Q * 8)
#define STEP_BYTES 32

#define AT_K 0
#define AT_V (AT_K + K_BYTES)
#define AT_Q (AT_V + V_BYTES)
#define AT_O (AT_Q + STAGES * Q_BYTES)
// Two buffers: one warpgroup may still read the last step's while the other writes this step's.
#define AT_DS (AT_O + STAGES * O_BYTES)
#define AT_DQ (AT_DS + 2 * DS_BYTES)
#define AT_STATS (AT_DQ + DQ_BUFFERS * DQ_BYTES)
#define AT_STEPS (AT_STATS + STAGES * STATS_BYTES)
#define AT_RING (AT_STEPS + STEPS * STEP_BYTES)
#define AT_BARRIERS (AT_RING + RING * 64)

// A warpgroup's share of dQ: 64 columns of 64 rows, or, of 128 rows, its 64 rows.
#define DQ_COLUMNS (TILE_Q == 128 ? HEAD_DIM : HEAD_DIM / 2)

#ifndef EARLY
#define EARLY 1
#endif
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
  const int first = low >> 7, last = high >> 7;  // tiles relative to this one, rounded down
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
    if (lane < HEAD_DIM / 8) *(uint4*)(k + lane * 8) = make_uint4(0, 0, 0, 0);
    if (lane < V_HEAD_DIM / 8) *(uint4*)(v + lane * 8) = make_uint4(0, 0, 0, 0);
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
    __syncwarp();
    if (lane == 0) barrier_arrive(bar.ring_full + 8 * slot);
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
            barrier_arrive_expecting(q_bar, Q_BYTES + STATS_BYTES + (whole ? 0 : O_BYTES));
            copy_panels<HEAD_DIM>(base + AT_Q + stage * Q_BYTES, Q_PANEL, tq, q_bar, head, token, q.x);
#if TILE_Q == 128
            copy_panels<HEAD_DIM>(base + AT_Q + stage * Q_BYTES + 8192, Q_PANEL, tq, q_bar, head, token + 64, q.x);
#endif
            copy_bytes_in(base + AT_STATS + stage * STATS_BYTES, buf.stats + (i64)target * (2 * TILE_Q), STATS_BYTES, q_bar);
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
    __syncwarp();
    if (lane == 0) barrier_arrive(bar.ring_empty + 8 * slot);
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
    __syncwarp();
    if (lane != 0) {
      if (steps < 0) return;
      continue;
    }
    barrier_arrive(bar.ring_empty + 8 * slot);
    if (steps < 0) return;
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

struct Consumer {
  u32 k, v, q, o, q_along_n, o_along_n, ds, k_along_n;  // descriptors
};

__device__ __forceinline__ void issue_scores(float (&s)[TILE_Q / 2], const Consumer& at, int stage) {
#pragma unroll
  for (int k = 0; k < HEAD_DIM / 16; k++)
    Shared<TILE_Q, 0, 0>::run(s, at.k + step_along_k(k, K_PANEL), at.q + stage * (Q_BYTES >> 4) + step_along_k(k, Q_PANEL), k > 0);
  products_commit();
}

__device__ __forceinline__ void differentiate(const Buffers& buf, u32 base, const Barriers& bar, int group) {
  const int thread = threadIdx.x & 127, lane = thread & 31;
  const int row = (thread >> 5) * 16 + (lane >> 2);  // and row + 8, of the warpgroup's 64
  const int key = group * 64 + row;
  const float scale = __int_as_float((int)buf.params[6]);
#if HAS_SOFTCAP
  const float cap = __int_as_float((int)buf.params[7]), per_cap = scale / cap, unit = cap * LOG2_E;
#else
  const float unit = scale * LOG2_E;
#endif
  Consumer at;
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
  u32 p[TILE_Q / 4], ds[TILE_Q / 4];
#pragma unroll
  for (int i = 0; i < TILE_Q / 2; i++) s[i] = dp[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < TILE_Q / 4; i++) p[i] = ds[i] = 0;
#pragma unroll
  for (int i = 0; i < DQ_COLUMNS / 2; i++) dq[i] = 0.0f;
  int step_count = 0;

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
      const int stage = STAGE_OF(step_count);
      // What the probabilities need besides the scores is read while those are under way.
      const u32 stats = base + AT_STATS + stage * STATS_BYTES + (lane & 3) * 8;
      const int4 mask = load_shared4(base + AT_STEPS + (step_count & (STEPS - 1)) * STEP_BYTES);  // own + right, own - left, keys
#if EARLY
      float2 early[TILE_Q / 8];
#pragma unroll
      for (int j = 0; j < TILE_Q / 8; j++) early[j] = load_shared_pair(stats + j * 32);
#endif
      products_wait<0>();
      pin(s);
      barrier_wait(bar.o_full + 8 * stage, PARITY_OF(step_count));
      pin(dp);
      products_fence();
#pragma unroll
      for (int k = 0; k < V_HEAD_DIM / 16; k++)
        Shared<TILE_Q, 0, 0>::run(dp, at.v + step_along_k(k, K_PANEL), at.o + stage * (O_BYTES >> 4) + step_along_k(k, Q_PANEL), k > 0);
      products_commit();

      // Probabilities, from the log-sum-exps in units of log 2.
#pragma unroll
      for (int j = 0; j < TILE_Q / 8; j++) {
#if EARLY
        const float2 l = early[j];
#else
        const float2 l = load_shared_pair(stats + j * 32);
#endif
#if HAS_SOFTCAP
        // s keeps the hyperbolic tangents, whose derivative is needed below.
        s[4 * j] = tanh_fast(s[4 * j] * per_cap), s[4 * j + 1] = tanh_fast(s[4 * j + 1] * per_cap);
        s[4 * j + 2] = tanh_fast(s[4 * j + 2] * per_cap), s[4 * j + 3] = tanh_fast(s[4 * j + 3] * per_cap);
        const float e0 = exp2_fast(fmaf(s[4 * j], unit, -l.x)), e1 = exp2_fast(fmaf(s[4 * j + 1], unit, -l.y));
        const float e2 = exp2_fast(fmaf(s[4 * j + 2], unit, -l.x)), e3 = exp2_fast(fmaf(s[4 * j + 3], unit, -l.y));
        p[2 * j] = pack2(e0, e1), p[2 * j + 1] = pack2(e2, e3);
#else
        s[4 * j] = exp2_fast(fmaf(s[4 * j], unit, -l.x)), s[4 * j + 1] = exp2_fast(fmaf(s[4 * j + 1], unit, -l.y));
        s[4 * j + 2] = exp2_fast(fmaf(s[4 * j + 2], unit, -l.x)), s[4 * j + 3] = exp2_fast(fmaf(s[4 * j + 3], unit, -l.y));
#endif
      }
      {
        const int first = group * 64, last = first + 63;
        if (last > mask.x || first < mask.y + TILE_Q - 1 || first < mask.z || last >= mask.w) {
          const int column = (lane & 3) * 2;
          int low0 = key - mask.x - column, high0 = key - mask.y + 1 - column, low8 = low0 + 8, high8 = high0 + 8;
          if (key < mask.z || key >= mask.w) high0 = -8;
          if (key + 8 < mask.z || key + 8 >= mask.w) high8 = -8;
#if HAS_SOFTCAP
#pragma unroll
          for (int j = 0; j < TILE_Q / 8; j++) {
            const bool a = j * 8 >= low0 && j * 8 < high0, b = j * 8 + 1 >= low0 && j * 8 + 1 < high0;
            const bool c = j * 8 >= low8 && j * 8 < high8, d = j * 8 + 1 >= low8 && j * 8 + 1 < high8;
            p[2 * j] &= (a ? 0xffffu : 0u) | (b ? 0xffff0000u : 0u);
            p[2 * j + 1] &= (c ? 0xffffu : 0u) | (d ? 0xffff0000u : 0u);
          }
#else
          mask_pairs(s, low0, high0, low8, high8);
#endif
        }
      }
#if !HAS_SOFTCAP
#pragma unroll
      for (int j = 0; j < TILE_Q / 4; j++) p[j] = pack2(s[2 * j], s[2 * j + 1]);
#endif

      pin(dv);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_Q / 16; k++)
        Registers<V_HEAD_DIM>::run(dv, p + 4 * k, at.o_along_n + stage * (O_BYTES >> 4) + step_along_n(k));
      products_commit();
#if EARLY
#pragma unroll
      for (int j = 0; j < TILE_Q / 8; j++) early[j] = load_shared_pair(stats + TILE_Q * 4 + j * 32);
#endif
      products_wait<1>();
      pin(dp);

#pragma unroll
      for (int j = 0; j < TILE_Q / 8; j++) {
#if EARLY
        const float2 d = early[j];
#else
        const float2 d = load_shared_pair(stats + TILE_Q * 4 + j * 32);
#endif
#if HAS_SOFTCAP
        const float t0 = s[4 * j], t1 = s[4 * j + 1], t2 = s[4 * j + 2], t3 = s[4 * j + 3];
        ds[2 * j] = pack2(low_of(p[2 * j]) * (dp[4 * j] - d.x) * (1.0f - t0 * t0), high_of(p[2 * j]) * (dp[4 * j + 1] - d.y) * (1.0f - t1 * t1));
        ds[2 * j + 1] =
            pack2(low_of(p[2 * j + 1]) * (dp[4 * j + 2] - d.x) * (1.0f - t2 * t2), high_of(p[2 * j + 1]) * (dp[4 * j + 3] - d.y) * (1.0f - t3 * t3));
#elif PACKED_P
        // Registers do not hold the f32 probabilities this long; the rounded ones are as exact as dS will be.
        ds[2 * j] = pack2(low_of(p[2 * j]) * (dp[4 * j] - d.x), high_of(p[2 * j]) * (dp[4 * j + 1] - d.y));
        ds[2 * j + 1] = pack2(low_of(p[2 * j + 1]) * (dp[4 * j + 2] - d.x), high_of(p[2 * j + 1]) * (dp[4 * j + 3] - d.y));
#else
        ds[2 * j] = pack2(s[4 * j] * (dp[4 * j] - d.x), s[4 * j + 1] * (dp[4 * j + 1] - d.y));
        ds[2 * j + 1] = pack2(s[4 * j + 2] * (dp[4 * j + 2] - d.x), s[4 * j + 3] * (dp[4 * j + 3] - d.y));
#endif
      }
      pin(dk);
      products_fence();
#pragma unroll
      for (int k = 0; k < TILE_Q / 16; k++)
        Registers<HEAD_DIM>::run(dk, ds + 4 * k, at.q_along_n + stage * (Q_BYTES >> 4) + step_along_n(k));
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
      // Only dQ is still under way, and it reads no queries.
      if (lane == 0) barrier_arrive(bar.step_empty + 8 * stage);
      // The next step's scores keep the tensor cores busy while this step's share leaves. After the last
      // step they are scores of stale queries, which nobody reads: a branch around products would make the
      // compiler wait for each of them.
      const int next = step_count + 1;
      if (n + 1 < steps) barrier_wait(bar.q_full + 8 * STAGE_OF(next), PARITY_OF(next));
      pin(s);
      products_fence();
      issue_scores(s, at, STAGE_OF(next));
      products_wait<1>();
      pin(dq);
      const int buffer = step_count % DQ_BUFFERS;
      barrier_wait(bar.dq_empty + 8 * buffer, ((step_count / DQ_BUFFERS) & 1) ^ 1);
#pragma unroll
      for (int j = 0; j < DQ_COLUMNS / 8; j++)
        store_shared4(base + AT_DQ + buffer * DQ_BYTES + group * (DQ_BYTES / 2) + j * 2048 + thread * 16, __float_as_uint(dq[4 * j]), __float_as_uint(dq[4 * j + 1]),
                      __float_as_uint(dq[4 * j + 2]), __float_as_uint(dq[4 * j + 3]));
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
    __syncwarp();
    if (lane == 0) barrier_arrive(bar.ring_empty + 8 * slot);
    const bool row_ok = key >= place.z && key < place.w, row8_ok = key + 8 >= place.z && key + 8 < place.w;
    const i64* stride = buf.params;
    half_bits* to = buf.dk + place.x * stride[0] + kv_head * stride[1] + (i64)(place.y + key) * stride[2];
    const float factor = __int_as_float((int)stride[6]);
    store_rows<HEAD_DIM>(dk, to, to + 8 * stride[2], factor, factor, row_ok, row8_ok, lane);
    to = buf.dv + place.x * stride[3] + kv_head * stride[4] + (i64)(place.y + key) * stride[5];
    store_rows<V_HEAD_DIM>(dv, to, to + 8 * stride[5], 1.0f, 1.0f, row_ok, row8_ok, lane);
  }
}

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
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warpgroup = threadIdx.x >> 7;
  if (threadIdx.x == 0) {
    barrier_init(bar.kv_full, 1), barrier_init(bar.kv_landed, 1), barrier_init(bar.kv_empty, CONSUMER_WARPS);
    for (int i = 0; i < DQ_BUFFERS; i++) barrier_init(bar.dq_full + 8 * i, CONSUMER_WARPS), barrier_init(bar.dq_empty + 8 * i, 1);
    for (int i = 0; i < STAGES; i++) {
      barrier_init(bar.q_full + 8 * i, 1), barrier_init(bar.o_full + 8 * i, 1), barrier_init(bar.q_landed + 8 * i, 1);
      barrier_init(bar.step_empty + 8 * i, CONSUMER_WARPS);
    }
    for (int i = 0; i < RING; i++) barrier_init(bar.ring_full + 8 * i, 1), barrier_init(bar.ring_empty + 8 * i, CONSUMER_WARPS + 1 + DQ_BUFFERS);
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

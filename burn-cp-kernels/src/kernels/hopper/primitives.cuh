// What the attention kernels for compute capability 9.0 share: types, barriers, bulk copies, warpgroup
// matrix products, and the stores of accumulator fragments.
//
// Each kernel's source is this file and one `.cu` file, glued together behind `#define`s that the host
// writes. There is no `#include`, so that a run-time compiler without a tool kit can build it.
//
// Set by the host:
//   HEAD_DIM, V_HEAD_DIM   columns of queries and keys, and of values and outputs, rounded up to multiples
//                          of 64. The tensors may have fewer, a multiple of 8: copies fill up with zeros.
//   ELEMENT_IS_BF16        1: bfloat16; 0: IEEE half precision
//   HAS_SOFTCAP, HAS_SINKS 0 or 1

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
typedef unsigned short half_bits;  // one element in memory, never computed with as such

// A tensor map is opaque to the kernel; the driver fills it, and it must lie on 64 bytes.
struct __align__(64) TensorMap {
  u64 opaque[16];
};

#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define NEG_INF (-__int_as_float(0x7f800000))

#if ELEMENT_IS_BF16
#define ELEMENT_PTX "bf16"
#else
#define ELEMENT_PTX "f16"
#endif

// ---------------------------------------------------------------------------------------------- numbers

// 2^x with denormal results flushed: the accuracy of `ex2.approx` is about 2 ulp, far below the rounding
// of the probabilities to 16 bits.
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float tanh_fast(float x) {
  // tanh.approx has 11 bits; this form keeps near f32 accuracy: 1 - 2 / (1 + e^(2x)), and near 0, where its digits cancel, the
  // series, to 3e-7 at the limit.
  const float e = exp2_fast(2.0f * LOG2_E * x);
  const float y = x * x;
  const float series = fmaf(x * y, fmaf(y, fmaf(y, -17.0f / 315.0f, 2.0f / 15.0f), -1.0f / 3.0f), x);
  return fabsf(x) < 0.25f ? series : 1.0f - __fdividef(2.0f, 1.0f + e);
}

// Two elements in one register, `low` in the lower half.
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 r;
#if ELEMENT_IS_BF16
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
  return r;
}

__device__ __forceinline__ float low_of(u32 pair) {
#if ELEMENT_IS_BF16
  return __uint_as_float(pair << 16);
#else
  float x;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a;}" : "=f"(x) : "r"(pair));
  return x;
#endif
}

__device__ __forceinline__ float high_of(u32 pair) {
#if ELEMENT_IS_BF16
  return __uint_as_float(pair & 0xffff0000u);
#else
  float x;
  asm("{.reg .f16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, b;}" : "=f"(x) : "r"(pair));
  return x;
#endif
}

__device__ __forceinline__ int clamp_int(int x, int low, int high) { return min(max(x, low), high); }

// ------------------------------------------------------------------------------------------ shared memory

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void store_shared4(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

__device__ __forceinline__ void store_shared1(u32 at, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}

__device__ __forceinline__ int load_shared1(u32 at) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ int4 load_shared4(u32 at) {
  int4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
  return x;
}

__device__ __forceinline__ float2 load_shared_pair(u32 at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
  return x;
}

// Four 8x8 matrices of 16-bit elements, each lane naming one row.
__device__ __forceinline__ void store_matrix4(u32 at, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// Ordinary accesses of shared memory before this come before the copy engine's and the tensor cores'.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ----------------------------------------------------------------------------------------------- barriers
//
// All hand-overs run over mbarriers in shared memory. A barrier's phase flips when its arrivals (and the
// bytes announced to it) are complete; a waiter names the parity of the phase that it waits for. A barrier
// of kind "full" starts with parity 0 awaited by its consumer, one of kind "empty" with parity 1 by its
// producer, which succeeds at once on a fresh barrier.

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void barrier_init_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  fence_async_shared();
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_arrive_expecting(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "AGAIN:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra READY;\n"
      "bra AGAIN;\n"
      "READY:\n}\n" ::"r"(barrier), "r"(parity)
      : "memory");
}

// Announces bytes without arriving: another thread arrives once it has done its part.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// A hardware barrier among `threads` threads; 0 is the block's own.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// -------------------------------------------------------------------------------------------- bulk copies

// One box of a tensor map to shared memory; coordinates outside the tensor read as zeros.
__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int column, int head, int token, int row) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(column), "r"(head), "r"(token), "r"(row)
      : "memory");
}

// `columns` columns as panels of 64, each `panel_bytes` after the one before. A panel is `rows` rows of
// 128 bytes, whose 16-byte pieces the copy engine permutes within their row by row number modulo 8.
template <int COLUMNS>
__device__ __forceinline__ void copy_panels(u32 to, u32 panel_bytes, const TensorMap* map, u32 barrier, int head, int token, int row) {
#pragma unroll
  for (int p = 0; p < COLUMNS / 64; p++) copy_box(to + p * panel_bytes, map, barrier, p * 64, head, token, row);
}

__device__ __forceinline__ void copy_bytes_in(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
               "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void copy_bytes_out(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void add_floats_out(void* to, u32 from, u32 bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void copies_out_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until the copies have read shared memory.
__device__ __forceinline__ void copies_out_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
// Until they have written global memory.
__device__ __forceinline__ void copies_out_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const TensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Zeros rows [begin, end) of all panels of a tile, by one warp. The permutation of a panel stays within a
// row, so whole rows are plain ranges. Called on tiles that reach past their segment: a neighbour's NaN
// times a probability of 0 would be NaN.
template <int COLUMNS>
__device__ __forceinline__ void zero_rows(u32 tile, u32 panel_bytes, int begin, int end, int lane) {
#pragma unroll 1
  for (int p = 0; p < COLUMNS / 64; p++)
#pragma unroll 1
    for (int at = begin * 128 + lane * 16; at < end * 128; at += 32 * 16) store_shared4(tile + p * panel_bytes + at, 0, 0, 0, 0);
}

// ------------------------------------------------------------------------------- warpgroup matrix products
//
// `wgmma` multiplies a 64 x 16 by a 16 x N matrix, issued by four warps together. B, and A if it is not in
// registers, is named by a descriptor of shared memory with the 128-byte permutation. Rows are "along K" if
// a panel's 128-byte rows run along the summed dim, else "along M/N".

// Its upper half is always the same: eight rows are 1024 bytes apart, 128-byte permutation. Kernels hold the
// lower half: the address, and the distance of panels, which matters only along M/N beyond 64 rows or
// columns. Both in units of 16 bytes, so offsets within shared memory are plain sums.
__device__ __forceinline__ u32 descriptor(u32 tile, u32 panel_bytes) { return tile >> 4 | (panel_bytes >> 4) << 16; }
__device__ __forceinline__ u64 whole_descriptor(u32 lower) {
  u64 d;
  asm("mov.b64 %0, {%1, %2};" : "=l"(d) : "r"(lower), "n"(1024 >> 4 | 1 << 30));
  return d;
}

// Steps of 16 along the summed dim, in descriptor units of 16 bytes.
__device__ __forceinline__ constexpr u32 step_along_k(int step, u32 panel_bytes) { return (step >> 2) * (panel_bytes >> 4) + (step & 3) * 2; }
__device__ __forceinline__ constexpr u32 step_along_n(int step) { return step * (16 * 128 >> 4); }

__device__ __forceinline__ void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
__device__ __forceinline__ void products_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving reads or writes of these registers over products in flight.
template <int N>
__device__ __forceinline__ void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ __forceinline__ void pin(u32 (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

#define REG_0_15 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define REG_16_31 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define REG_32_47 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define REG_48_63 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define REG_64_95 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define REG_96_127 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define REGS_32 REG_0_15
#define REGS_64 REGS_32 ", " REG_16_31
#define REGS_96 REGS_64 ", " REG_32_47
#define REGS_128 REGS_96 ", " REG_48_63
#define REGS_192 REGS_128 ", " REG_64_95
#define REGS_256 REGS_192 ", " REG_96_127
#define ACC_8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
    "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define ACC_32 ACC_8(0), ACC_8(8)
#define ACC_64 ACC_32, ACC_8(16), ACC_8(24)
#define ACC_96 ACC_64, ACC_8(32), ACC_8(40)
#define ACC_128 ACC_96, ACC_8(48), ACC_8(56)
#define ACC_192 ACC_128, ACC_8(64), ACC_8(72), ACC_8(80), ACC_8(88)
#define ACC_256 ACC_192, ACC_8(96), ACC_8(104), ACC_8(112), ACC_8(120)

// A and B in shared memory; A_ALONG_M and B_ALONG_N say how they lie. `keep` 0 overwrites the accumulators.
template <int N, int A_ALONG_M, int B_ALONG_N>
struct Shared;
#define WGMMA_SHARED(N, A, B, KEEP, TA, TB)                                                                   \
  template <int A_ALONG_M, int B_ALONG_N>                                                                     \
  struct Shared<N, A_ALONG_M, B_ALONG_N> {                                                                    \
    __device__ __forceinline__ static void run(float (&d)[N / 2], u32 a, u32 b, int keep) {                   \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP                                                   \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ELEMENT_PTX "." ELEMENT_PTX        \
                   " {" REGS_##N "}, " A ", " B ", p, 1, 1, " TA ", " TB ";\n}\n"                             \
                   : ACC_##N                                                                                  \
                   : "l"(whole_descriptor(a)), "l"(whole_descriptor(b)), "r"(keep), "n"(A_ALONG_M),           \
                     "n"(B_ALONG_N));                                                                         \
    }                                                                                                         \
  };
WGMMA_SHARED(32, "%16", "%17", "%18", "%19", "%20")
WGMMA_SHARED(64, "%32", "%33", "%34", "%35", "%36")
WGMMA_SHARED(96, "%48", "%49", "%50", "%51", "%52")
WGMMA_SHARED(128, "%64", "%65", "%66", "%67", "%68")
WGMMA_SHARED(192, "%96", "%97", "%98", "%99", "%100")
WGMMA_SHARED(256, "%128", "%129", "%130", "%131", "%132")

// A in registers (in the layout of an accumulator of 16 columns, packed), B in shared memory; otherwise as `Shared`.
template <int N, int B_ALONG_N>
struct Registers;
#define WGMMA_REGISTERS(N, A, B, KEEP, TB)                                                                    \
  template <int B_ALONG_N>                                                                                    \
  struct Registers<N, B_ALONG_N> {                                                                            \
    __device__ __forceinline__ static void run(float (&d)[N / 2], const u32* a, u32 b, int keep) {            \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " KEEP                                                   \
                   ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." ELEMENT_PTX "." ELEMENT_PTX        \
                   " {" REGS_##N "}, {" A "}, " B ", p, 1, 1, " TB ";\n}\n"                                   \
                   : ACC_##N                                                                                  \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(whole_descriptor(b)), "r"(keep),         \
                     "n"(B_ALONG_N));                                                                         \
    }                                                                                                         \
  };
WGMMA_REGISTERS(32, "%16, %17, %18, %19", "%20", "%21", "%22")
WGMMA_REGISTERS(64, "%32, %33, %34, %35", "%36", "%37", "%38")
WGMMA_REGISTERS(96, "%48, %49, %50, %51", "%52", "%53", "%54")
WGMMA_REGISTERS(128, "%64, %65, %66, %67", "%68", "%69", "%70")
WGMMA_REGISTERS(192, "%96, %97, %98, %99", "%100", "%101", "%102")
WGMMA_REGISTERS(256, "%128, %129, %130, %131", "%132", "%133", "%134")

// Four matrices of 8 rows of 16 bytes, as `Registers` takes them.
__device__ __forceinline__ void load_matrices(u32* to, u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// ---------------------------------------------------------------------------------------- storing fragments

// Transposes a 4x4 matrix of words that lies over the four lanes of a quad: afterwards lane i holds what
// was word i of lanes 0 to 3.
__device__ __forceinline__ void transpose_quad(u32& a, u32& b, u32& c, u32& d, int lane) {
  const bool odd = lane & 1, high = lane & 2;
  u32 t = __shfl_xor_sync(~0u, odd ? a : b, 1);
  if (odd) a = t; else b = t;
  t = __shfl_xor_sync(~0u, odd ? c : d, 1);
  if (odd) c = t; else d = t;
  t = __shfl_xor_sync(~0u, high ? a : c, 2);
  if (high) a = t; else c = t;
  t = __shfl_xor_sync(~0u, high ? b : d, 2);
  if (high) b = t; else d = t;
}

// Stores one thread's share of a 64 x N accumulator, rows `row` and `row + 8` scaled by `f0` and `f1`, as
// 16-byte pieces: the quad holds 8 columns of a row in 4 lanes, so four such groups are transposed.
// `to` is the first element of row `row`, or of row `row + 8` for `to8`; the tensor has `columns` from there.
template <int N>
__device__ __forceinline__ void store_rows(const float (&d)[N / 2], half_bits* to, half_bits* to8, int columns, float f0, float f1,
                                           bool row_ok, bool row8_ok, int lane) {
  const int quad = lane & 3;
#pragma unroll
  for (int j = 0; j < N / 8; j += 4) {
    u32 a = pack2(d[4 * j] * f0, d[4 * j + 1] * f0), b = pack2(d[4 * j + 4] * f0, d[4 * j + 5] * f0);
    u32 c = pack2(d[4 * j + 8] * f0, d[4 * j + 9] * f0), e = pack2(d[4 * j + 12] * f0, d[4 * j + 13] * f0);
    transpose_quad(a, b, c, e, lane);
    const bool inside = (j + quad) * 8 < columns;
    if (row_ok && inside) *(uint4*)(to + (j + quad) * 8) = make_uint4(a, b, c, e);
    a = pack2(d[4 * j + 2] * f1, d[4 * j + 3] * f1), b = pack2(d[4 * j + 6] * f1, d[4 * j + 7] * f1);
    c = pack2(d[4 * j + 10] * f1, d[4 * j + 11] * f1), e = pack2(d[4 * j + 14] * f1, d[4 * j + 15] * f1);
    transpose_quad(a, b, c, e, lane);
    if (row8_ok && inside) *(uint4*)(to8 + (j + quad) * 8) = make_uint4(a, b, c, e);
  }
}

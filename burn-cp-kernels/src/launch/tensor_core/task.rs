//! A kernel of this routine as a task: its CubeCL definition, and the function of CUDA that its exponentials call.
//!
//! CubeCL compiles `exp` of a fast mode to CUDA's `__expf`, which costs five instructions where `2^x`
//! needs one, and has no `2^x` of its own. So the kernels use that exponential as `2^x` only, and the source starts with a definition of it.

use burn::tensor::{bf16, f16};
use cubecl::{
    CompilationError, Compiler, CubeTask, Runtime,
    cuda::{CudaCompiler, CudaRuntime},
    ir::{DeviceProperties, StorageType, Type},
    prelude::*,
    server::ExecutionMode,
};

use crate::{
    components::matrix::{
        Chunk, JOINT_UNITS, KeyPart, MatrixBlueprint, Pair, Quad32, ScalarsExpand, UNITS,
    },
    kernels::tensor_core as kernels,
};

/// The kernel of an entry point.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Entry {
    Forward,
    Queries,
    Keys(KeyPart),
    Gradients,
    Finish,
}

/// A kernel to launch.
#[derive(Debug, Clone)]
pub(super) struct Task {
    pub(super) entry: Entry,
    pub(super) blueprint: MatrixBlueprint,
    pub(super) is_bf16: bool,
    /// None where there is no device, in tests.
    pub(super) properties: Option<DeviceProperties>,
}

/// What CubeCL calls a fast exponential, and what it becomes here.
const NAME: &str = "__expf(";
const EXPONENTIAL: &str = "\
static __device__ __forceinline__ float attention_exp2(float x) {
  float y;
  asm(\"ex2.approx.ftz.f32 %0, %1;\" : \"=f\"(y) : \"f\"(x));
  return y;
}
#define __expf(x) attention_exp2(x)
";
/// What the atomics of the kernel for all gradients become. CubeCL loads by adding 0 and stores by an exchange, neither with an order of
/// other reads and writes. Turns are read as they are, and stored after what their cube has written; shares are added in memory, four
/// numbers at a time, or begun.
const ATOMICS: &str = "\
static __device__ __forceinline__ uint32 attention_add(uint32* at, uint32 more) {
  uint32 now;
  if (more == 0)
    asm volatile(\"ld.relaxed.gpu.global.u32 %0, [%1];\" : \"=r\"(now) : \"l\"(at) : \"memory\");
  else
    asm volatile(\"atom.relaxed.gpu.global.add.u32 %0, [%1], %2;\" : \"=r\"(now) : \"l\"(at), \"r\"(more) : \"memory\");
  return now;
}
static __device__ __forceinline__ float4 attention_add(float4* at, const float4& more) {
  asm volatile(\"red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};\" ::\"l\"(at), \"f\"(more.x), \"f\"(more.y), \"f\"(more.z),
               \"f\"(more.w)
               : \"memory\");
  return more;
}
static __device__ __forceinline__ uint32 attention_set(uint32* at, uint32 next) {
  asm volatile(\"st.release.gpu.global.u32 [%0], %1;\" ::\"l\"(at), \"r\"(next) : \"memory\");
  return next;
}
template <typename T>
static __device__ __forceinline__ T attention_set(T* at, const T& first) {
  return *at = first;
}
#define atomicAdd(at, more) attention_add(at, more)
#define atomicExch(at, next) attention_set(at, next)
";

impl Task {
    /// The source with definitions before its kernel.
    fn after_includes(&self, source: &str) -> String {
        let at = source.find("extern \"C\"").unwrap_or(0);
        let (before, kernel) = source.split_at(at);
        let atomics = match self.entry {
            Entry::Gradients => ATOMICS,
            _ => "",
        };
        format!("{before}{EXPONENTIAL}{atomics}{kernel}")
    }

    fn name(&self) -> &'static str {
        match self.entry {
            Entry::Forward => "attention_tensor_core_forward",
            Entry::Queries => "attention_tensor_core_queries",
            Entry::Keys(_) => "attention_tensor_core_keys",
            Entry::Gradients => "attention_tensor_core_gradients",
            Entry::Finish => "attention_tensor_core_finish",
        }
    }

    fn cube_dim(&self) -> CubeDim {
        CubeDim::new_1d(match self.entry {
            Entry::Gradients | Entry::Finish => JOINT_UNITS as u32,
            _ => UNITS as u32,
        })
    }

    fn define<F: Float + CubePrimitive>(&self) -> KernelDefinition {
        let mut builder = KernelBuilder::default();
        builder.runtime_properties(<CudaRuntime as Runtime>::target_properties());
        if let Some(properties) = &self.properties {
            builder.device_properties(properties);
        }
        AddressType::U64.register(&mut builder.scope);
        match self.entry {
            Entry::Forward => self.forward::<F>(&mut builder),
            Entry::Queries => self.queries::<F>(&mut builder),
            Entry::Keys(part) => self.keys::<F>(part, &mut builder),
            Entry::Gradients => self.gradients::<F>(&mut builder),
            Entry::Finish => self.finish::<F>(&mut builder),
        }
        let settings = KernelSettings::default()
            .cube_dim(self.cube_dim())
            .address_type(AddressType::U64)
            .kernel_name(self.name());
        builder.build(settings)
    }

    fn forward<F: Float + CubePrimitive>(&self, builder: &mut KernelBuilder) {
        let types = Types::new::<F>(builder);
        let [q, k, v] = [0; 3].map(|_| builder.input_tensor(types.chunk));
        let sinks = builder.input_array(types.float);
        let tiles = builder.input_array(types.int);
        let out = builder.output_tensor(types.pair);
        let lse = builder.output_tensor(types.float);
        let scalars = scalars(builder);
        kernels::forward::forward::expand::<F>(
            &mut builder.scope,
            q.into(),
            k.into(),
            v.into(),
            sinks.into(),
            tiles.into(),
            out.into(),
            lse.into(),
            scalars,
            self.blueprint,
        );
    }

    fn queries<F: Float + CubePrimitive>(&self, builder: &mut KernelBuilder) {
        let types = Types::new::<F>(builder);
        let [q, k, v, dout] = [0; 4].map(|_| builder.input_tensor(types.chunk));
        let rows = builder.input_array(types.float);
        let tiles = builder.input_array(types.int);
        let dq = builder.output_tensor(types.pair);
        let scalars = scalars(builder);
        kernels::queries::queries::expand::<F>(
            &mut builder.scope,
            q.into(),
            k.into(),
            v.into(),
            dout.into(),
            rows.into(),
            tiles.into(),
            dq.into(),
            scalars,
            self.blueprint,
        );
    }

    fn keys<F: Float + CubePrimitive>(&self, part: KeyPart, builder: &mut KernelBuilder) {
        let types = Types::new::<F>(builder);
        let [q, k, v, dout] = [0; 4].map(|_| builder.input_tensor(types.chunk));
        let rows = builder.input_array(types.float);
        let [tiles, visits] = [0; 2].map(|_| builder.input_array(types.int));
        let [dk, dv] = [0; 2].map(|_| builder.output_tensor(types.pair));
        let scalars = scalars(builder);
        kernels::keys::keys::expand::<F>(
            &mut builder.scope,
            q.into(),
            k.into(),
            v.into(),
            dout.into(),
            rows.into(),
            tiles.into(),
            visits.into(),
            dk.into(),
            dv.into(),
            scalars,
            part,
            self.blueprint,
        );
    }
}

impl Task {
    fn gradients<F: Float + CubePrimitive>(&self, builder: &mut KernelBuilder) {
        let types = Types::new::<F>(builder);
        let [q, k, v, dout] = [0; 4].map(|_| builder.input_tensor(types.chunk));
        let rows = builder.input_array(types.float);
        let [tiles, runs] = [0; 2].map(|_| builder.input_array(types.int));
        let turns = builder.output_array(Atomic::<u32>::as_type(&builder.scope));
        let shares = builder.output_array(Atomic::<Quad32>::as_type(&builder.scope));
        let [dk, dv] = [0; 2].map(|_| builder.output_tensor(types.pair));
        let scalars = scalars(builder);
        kernels::gradients::gradients::expand::<F>(
            &mut builder.scope,
            q.into(),
            k.into(),
            v.into(),
            dout.into(),
            rows.into(),
            tiles.into(),
            runs.into(),
            turns.into(),
            shares.into(),
            dk.into(),
            dv.into(),
            scalars,
            self.blueprint,
        );
    }

    fn finish<F: Float + CubePrimitive>(&self, builder: &mut KernelBuilder) {
        let types = Types::new::<F>(builder);
        let q_tiles = builder.input_array(types.int);
        let turns = builder.input_array(u32::as_type(&builder.scope));
        let shares = builder.input_array(types.quad);
        let dq = builder.output_tensor(types.pair);
        let scalars = scalars(builder);
        kernels::shares::finish::expand::<F>(
            &mut builder.scope,
            q_tiles.into(),
            turns.into(),
            shares.into(),
            dq.into(),
            scalars,
            self.blueprint,
        );
    }
}

/// Types of what kernels bind.
struct Types {
    chunk: Type,
    pair: Type,
    quad: Type,
    float: Type,
    int: Type,
}

impl Types {
    fn new<F: Float + CubePrimitive>(builder: &KernelBuilder) -> Self {
        let scope = &builder.scope;
        Self {
            chunk: Chunk::<F>::as_type(scope),
            pair: Pair::<F>::as_type(scope),
            quad: Quad32::as_type(scope),
            float: f32::as_type(scope),
            int: i32::as_type(scope),
        }
    }
}

/// In the order in which a launch pushes them.
fn scalars(builder: &mut KernelBuilder) -> ScalarsExpand {
    let float = f32::as_type(&builder.scope).storage_type();
    let count = u32::as_type(&builder.scope).storage_type();
    let size = AddressType::U64.unsigned_type();
    ScalarsExpand {
        scale: builder.scalar(float).into(),
        softcap: builder.scalar(float).into(),
        minus_infinity: builder.scalar(float).into(),
        num_tiles: builder.scalar(count).into(),
        group: builder.scalar(count).into(),
        num_rows: builder.scalar(size).into(),
    }
}

impl KernelMetadata for Task {
    fn id(&self) -> KernelId {
        KernelId::new::<Self>()
            .info((self.entry, self.blueprint, self.is_bf16))
            .cube_dim(self.cube_dim())
    }

    fn address_type(&self) -> StorageType {
        AddressType::U64.unsigned_type()
    }
}

impl CubeTask<CudaCompiler> for Task {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        let definition = match self.is_bf16 {
            true => self.define::<bf16>(),
            false => self.define::<f16>(),
        };
        let kernel = compiler.compile(definition, options, mode, address)?;
        let source = kernel.to_string();
        if self.entry != Entry::Finish && !source.contains(NAME) {
            return Err(CompilationError::Generic {
                reason: format!("the source of {} has no {NAME}..)", self.name()),
                backtrace: cubecl::backtrace::BackTrace::capture(),
            });
        }
        Ok(CompiledKernel {
            entrypoint_name: self.name().into(),
            debug_name: Some(self.name()),
            // The definition must come after the includes, which have functions of that name.
            source: self.after_includes(&source),
            repr: Some(kernel),
            cube_dim: self.cube_dim(),
            debug_info: None,
        })
    }
}

#[cfg(test)]
mod tests;

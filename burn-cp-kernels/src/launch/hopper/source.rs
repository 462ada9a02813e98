//! A CUDA source as a kernel of CubeCL: compiled by its nvrtc for the device, launched on its stream.

use std::hash::{DefaultHasher, Hash, Hasher};

use cubecl::{
    CompilationError, Compiler, CubeTask, Runtime,
    cuda::{CudaCompiler, CudaRuntime},
    ir::{AddressType, StorageType},
    prelude::*,
    server::ExecutionMode,
};

use super::plan;
use crate::definition::AttentionProblem;

/// The files, in `kernels/hopper`.
const PRIMITIVES: &str = include_str!("../../kernels/hopper/primitives.cuh");
const FORWARD: &str = include_str!("../../kernels/hopper/forward.cu");
const BACKWARD_ROLES: &str = include_str!("../../kernels/hopper/backward_roles.cuh");
const BACKWARD: &str = include_str!("../../kernels/hopper/backward.cu");
const BACKWARD_WIDE: &str = include_str!("../../kernels/hopper/backward_wide.cu");
const BACKWARD_ENDS: &str = include_str!("../../kernels/hopper/backward_ends.cu");

/// The kernels of the routine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Entry {
    Forward,
    BackwardBegin,
    Backward,
    BackwardEnd,
    BackwardSinks,
}

/// What sources are specialised for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub(super) head_dim: usize,
    pub(super) v_head_dim: usize,
    pub(super) bf16: bool,
    pub(super) softcap: bool,
    pub(super) sinks: bool,
}

impl Variant {
    pub(super) fn new(problem: &AttentionProblem, bf16: bool, softcap: bool, sinks: bool) -> Self {
        Self {
            head_dim: problem.head_dim,
            v_head_dim: problem.v_head_dim,
            bf16,
            softcap,
            sinks,
        }
    }

    fn defines(&self) -> String {
        let flag = |flag: bool| u8::from(flag);
        format!(
            "#define HEAD_DIM {}\n#define V_HEAD_DIM {}\n#define ELEMENT_IS_BF16 {}\n\
             #define HAS_SOFTCAP {}\n#define HAS_SINKS {}\n",
            self.head_dim,
            self.v_head_dim,
            flag(self.bf16),
            flag(self.softcap),
            flag(self.sinks)
        )
    }
}

/// A kernel to launch.
#[derive(Debug, Clone)]
pub(super) struct Source {
    entry: Entry,
    variant: Variant,
}

impl Source {
    pub(super) fn new(entry: Entry, variant: Variant) -> Self {
        Self { entry, variant }
    }

    fn name(&self) -> &'static str {
        match self.entry {
            Entry::Forward => "attention_forward",
            Entry::BackwardBegin => "attention_backward_begin",
            Entry::Backward => "attention_backward",
            Entry::BackwardEnd => "attention_backward_end",
            Entry::BackwardSinks => "attention_backward_sinks",
        }
    }

    fn files(&self) -> Vec<&'static str> {
        match self.entry {
            Entry::Forward => vec![PRIMITIVES, FORWARD],
            Entry::Backward if self.variant.head_dim > 128 => {
                vec![PRIMITIVES, BACKWARD_ROLES, BACKWARD_WIDE]
            }
            Entry::Backward => vec![PRIMITIVES, BACKWARD_ROLES, BACKWARD],
            _ => vec![PRIMITIVES, BACKWARD_ENDS],
        }
    }

    fn threads(&self) -> u32 {
        match self.entry {
            // One warpgroup loads, the others compute.
            Entry::Forward => 128 * (self.groups() as u32 + 1),
            Entry::Backward => 384,
            Entry::BackwardBegin => 128,
            Entry::BackwardEnd | Entry::BackwardSinks => 256,
        }
    }

    fn groups(&self) -> usize {
        plan::forward_groups(self.variant.head_dim, self.variant.v_head_dim)
    }

    /// Bytes of dynamic shared memory, as the sources lay it out.
    fn shared_bytes(&self) -> usize {
        let (dim, v_dim) = (self.variant.head_dim, self.variant.v_head_dim);
        match self.entry {
            Entry::Forward => {
                let (keys, groups) = (plan::forward_keys(dim), self.groups());
                let stages = if groups == 3 { 4 } else { 2 };
                let tiles = 128 * groups * dim + 2 * stages * keys * (dim + v_dim);
                1024 + tiles + 4 * 64 + 80 + 40 * stages
            }
            Entry::Backward => {
                let (keys, queries) = (plan::backward_keys(dim), plan::backward_queries(dim));
                let stages = if dim > 192 { 1 } else { 2 };
                let (weights, buffers) = if dim > 128 { (8, 1) } else { (4, 2) };
                let tiles = 2 * (keys + stages * queries) * (dim + v_dim);
                let sums = weights * keys * queries + 4 * buffers * queries * dim;
                tiles + sums + 8 * stages * queries + 472 + 32 * stages
            }
            _ => 0,
        }
    }

    fn text(&self) -> String {
        self.variant.defines() + &self.files().join("\n")
    }
}

impl KernelMetadata for Source {
    fn id(&self) -> KernelId {
        // Compiled kernels may be kept on disk under their id: another source must be another kernel.
        let mut hasher = DefaultHasher::new();
        self.files().hash(&mut hasher);
        KernelId::new::<Self>()
            .info((self.entry, self.variant, hasher.finish()))
            .cube_dim(CubeDim::new_1d(self.threads()))
    }

    fn address_type(&self) -> StorageType {
        AddressType::U64.unsigned_type()
    }
}

/// Uses shared memory of a size. CubeCL sizes a launch by the kernel that it has compiled, so this one stands
/// in for the source.
#[cube]
fn reserve(out: &mut Array<u32>, #[comptime] words: usize) {
    if comptime!(words > 0) {
        let mut shared = SharedMemory::<u32>::new_aligned(words, 128usize);
        shared[UNIT_POS as usize] = UNIT_POS;
        sync_cube();
        out[0] = shared[0];
    } else {
        out[0] = 0u32;
    }
}

impl CubeTask<CudaCompiler> for Source {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        let mut builder = KernelBuilder::default();
        builder.runtime_properties(<CudaRuntime as Runtime>::target_properties());
        AddressType::U64.register(&mut builder.scope);
        let number = u32::as_type(&builder.scope);
        let out = builder.output_array(number);
        reserve::expand(&mut builder.scope, out.into(), self.shared_bytes() / 4);
        let cube_dim = CubeDim::new_1d(self.threads());
        let settings = KernelSettings::default()
            .cube_dim(cube_dim)
            .address_type(AddressType::U64)
            .kernel_name(self.name());
        let stand_in = compiler.compile(builder.build(settings), options, mode, address)?;
        Ok(CompiledKernel {
            entrypoint_name: self.name().into(),
            debug_name: Some(self.name()),
            source: self.text(),
            repr: Some(stand_in),
            cube_dim,
            debug_info: None,
        })
    }
}

use super::*;
use crate::{components::Features, routines::tensor_core};

fn compiled(
    entry: Entry,
    blueprint: MatrixBlueprint,
    is_bf16: bool,
) -> CompiledKernel<CudaCompiler> {
    let mut options = <CudaCompiler as Compiler>::CompilationOptions::default();
    options.supports_features.fast_math = true;
    options.supports_features.grid_constants = true;
    options.warp_size = 32;
    let task = Task {
        entry,
        blueprint,
        is_bf16,
        properties: None,
    };
    let mut compiler = CudaCompiler::default();
    let address = task.address_type();
    let kernel = task.compile(&mut compiler, &options, ExecutionMode::Unchecked, address);
    kernel.unwrap_or_else(|error| panic!("{error:?}"))
}

#[test]
fn blueprints_know_the_shared_memory_of_their_kernels() {
    for (dim, v_dim) in [(128, 128), (72, 40), (256, 256)] {
        let problem = tensor_core::tests::problem(dim, v_dim);
        let blueprint =
            tensor_core::blueprint(&problem, Features::default(), 227 << 10, true).unwrap();
        let part = match blueprint.key_parts {
            true => KeyPart::Keys,
            false => KeyPart::Both,
        };
        let entries = [Entry::Forward, Entry::Queries, Entry::Keys(part)];
        for (entry, said) in entries.into_iter().zip(blueprint.shared_bytes()) {
            let used = compiled(entry, blueprint, true).repr.unwrap();
            let used = used.shared_memory_size();
            assert!(
                used >= said && used <= said + tensor_core::BARRIERS,
                "{used} {said}"
            );
        }
        assert_eq!(blueprint.joint, dim == 128);
        if let Some(said) = blueprint.joint_bytes() {
            let used = compiled(Entry::Gradients, blueprint, true).repr.unwrap();
            let used = used.shared_memory_size();
            assert!(
                used >= said && used <= said + tensor_core::BARRIERS,
                "{used} {said}"
            );
        }
    }
}

#[test]
fn exponentials_of_the_kernels_are_those_of_the_source() {
    let problem = tensor_core::tests::problem(128, 128);
    let blueprint = tensor_core::blueprint(&problem, Features::default(), 227 << 10, true).unwrap();
    for entry in [
        Entry::Forward,
        Entry::Queries,
        Entry::Keys(KeyPart::Both),
        Entry::Gradients,
    ] {
        let source = compiled(entry, blueprint, true).source;
        let definition = source.find("#define __expf").unwrap();
        assert!(source.rfind("#include").unwrap() < definition);
        assert!(source.rfind("__expf(").unwrap() > definition);
        // Another exponential would be one of base e.
        let calls = |name| source.matches(name).count();
        assert_eq!(calls("exp("), 0);
        assert_eq!(calls("expf("), calls("__expf("));
    }
}

#[test]
fn atomics_of_the_kernel_are_those_of_the_source() {
    let problem = tensor_core::tests::problem(128, 128);
    let blueprint = tensor_core::blueprint(&problem, Features::default(), 227 << 10, true).unwrap();
    let source = compiled(Entry::Gradients, blueprint, true).source;
    let (definitions, kernel) = source.split_at(source.find("extern \"C\"").unwrap());
    for name in ["atomicAdd(", "atomicExch("] {
        assert!(definitions.contains(&format!("#define {name}")));
        assert!(kernel.contains(name));
    }
    // Others would have another order.
    let of = |name| kernel.matches(name).count();
    assert_eq!(of("atomic"), of("atomicAdd(") + of("atomicExch("));
    let other = compiled(Entry::Forward, blueprint, true).source;
    assert!(!other.contains("#define atomic"));
}

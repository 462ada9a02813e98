//! Modules that are the module of Burn's that they were made from, with another forward pass.

use burn::{
    module::{ModuleVisitor, Param, ParamId},
    tensor::{Bool, Int, Tensor, backend::Backend},
};

/// Implements `Module` and `AutodiffModule` for a struct `$ours { $inner: $burns, .. }` by its field `$inner`: the same parameters
/// under the same paths and ids, the same record. A visitor is told that the attention inside has been converted.
macro_rules! delegate_module {
    ($ours:ident, $inner:ident: $burns:ident, $($rest:ident),+) => {
        impl<B: burn::tensor::backend::Backend> burn::module::Module<B> for $ours<B> {
            type Record = <$burns<B> as burn::module::Module<B>>::Record;

            fn collect_devices(&self, devices: burn::module::Devices<B>) -> burn::module::Devices<B> {
                self.$inner.collect_devices(devices)
            }

            fn fork(self, device: &B::Device) -> Self {
                Self {
                    $inner: self.$inner.fork(device),
                    ..self
                }
            }

            fn to_device(self, device: &B::Device) -> Self {
                Self {
                    $inner: self.$inner.to_device(device),
                    ..self
                }
            }

            fn visit<V: burn::module::ModuleVisitor<B>>(&self, visitor: &mut V) {
                self.$inner.visit(&mut $crate::nn::delegate::Converted(visitor));
            }

            fn map<P: burn::module::ModuleMapper<B>>(self, mapper: &mut P) -> Self {
                Self {
                    $inner: self.$inner.map(mapper),
                    ..self
                }
            }

            fn load_record(self, record: Self::Record) -> Self {
                Self {
                    $inner: self.$inner.load_record(record),
                    ..self
                }
            }

            fn into_record(self) -> Self::Record {
                self.$inner.into_record()
            }
        }

        impl<B: burn::tensor::backend::AutodiffBackend> burn::module::AutodiffModule<B> for $ours<B> {
            type InnerModule = $ours<B::InnerBackend>;

            fn valid(&self) -> Self::InnerModule {
                $ours {
                    $inner: self.$inner.valid(),
                    $($rest: self.$rest,)+
                }
            }

            fn from_inner(module: Self::InnerModule) -> Self {
                Self {
                    $inner: $burns::from_inner(module.$inner),
                    $($rest: module.$rest,)+
                }
            }
        }

        // What a derived module has, and fields of other derived modules need.
        impl<B: burn::tensor::backend::Backend> burn::module::ModuleDisplayDefault for $ours<B> {
            fn content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                burn::module::ModuleDisplayDefault::content(&self.$inner, content)
            }

            fn num_params(&self) -> usize {
                burn::module::Module::num_params(&self.$inner)
            }
        }

        impl<B: burn::tensor::backend::Backend> burn::module::ModuleDisplay for $ours<B> {
            fn custom_content(&self, content: burn::module::Content) -> Option<burn::module::Content> {
                burn::module::ModuleDisplay::custom_content(&self.$inner, content)
            }
        }

        impl<B: burn::tensor::backend::Backend> std::fmt::Display for $ours<B> {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "{}({})", stringify!($ours), self.$inner)
            }
        }
    };
}

pub(super) use delegate_module;

/// A visitor that is given other names for the containers of attention that has been converted, and all else as it is.
pub(super) struct Converted<'a, V>(pub(super) &'a mut V);

fn renamed(container_type: &str) -> String {
    match container_type.strip_prefix("Struct:") {
        Some(name) if super::audit::is_attention(container_type) => {
            format!("Struct:ContextParallel({name})")
        }
        _ => container_type.to_owned(),
    }
}

impl<B: Backend, V: ModuleVisitor<B>> ModuleVisitor<B> for Converted<'_, V> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.visit_float(param);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.0.visit_int(param);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.0.visit_bool(param);
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        self.0.enter_module(name, &renamed(container_type));
    }

    fn exit_module(&mut self, name: &str, container_type: &str) {
        self.0.exit_module(name, &renamed(container_type));
    }

    fn visit_float_with_path<const D: usize>(
        &mut self,
        path: &[String],
        id: ParamId,
        tensor: &Tensor<B, D>,
    ) {
        self.0.visit_float_with_path(path, id, tensor);
    }

    fn visit_int_with_path<const D: usize>(
        &mut self,
        path: &[String],
        id: ParamId,
        tensor: &Tensor<B, D, Int>,
    ) {
        self.0.visit_int_with_path(path, id, tensor);
    }

    fn visit_bool_with_path<const D: usize>(
        &mut self,
        path: &[String],
        id: ParamId,
        tensor: &Tensor<B, D, Bool>,
    ) {
        self.0.visit_bool_with_path(path, id, tensor);
    }
}

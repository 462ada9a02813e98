//! Between the weights that are trained, in f32, and those that are computed with.

use std::marker::PhantomData;

use burn::{
    module::{AutodiffModule, Module, ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        FloatDType, Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

struct Cast(FloatDType);

impl<B: Backend> ModuleMapper<B> for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let (id, value, mapper) = param.consume();
        let trained = value.is_require_grad();
        // A leaf of its own: the cast is not part of any graph.
        let value = value.cast(self.0).detach().set_require_grad(trained);
        Param::from_mapped_value(id, value, mapper)
    }
}

/// The same parameters, ids kept, as `dtype`.
pub(super) fn cast_parameters<B: Backend, M: Module<B>>(model: M, dtype: FloatDType) -> M {
    model.map(&mut Cast(dtype))
}

struct CastGradients<B> {
    from: GradientsParams,
    to: GradientsParams,
    backend: PhantomData<B>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for CastGradients<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        if let Some(grad) = self.from.remove::<B::InnerBackend, D>(param.id) {
            self.to
                .register::<B::InnerBackend, D>(param.id, grad.cast(FloatDType::F32));
        }
    }
}

/// Gradients in f32.
pub(super) fn cast_gradients<B: AutodiffBackend, M: AutodiffModule<B>>(
    grads: GradientsParams,
    model: &M,
) -> GradientsParams {
    let mut cast = CastGradients::<B> {
        from: grads,
        to: GradientsParams::new(),
        backend: PhantomData,
    };
    model.visit(&mut cast);
    cast.to
}

#[derive(Default)]
struct Ids(Vec<String>);

impl<B: Backend> ModuleVisitor<B> for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.push(param.id.serialize());
    }
}

/// The ids of all parameters in the order of modules: an optimizer's state goes by them.
pub(super) fn parameter_ids<B: Backend, M: Module<B>>(model: &M) -> Vec<String> {
    let mut ids = Ids::default();
    model.visit(&mut ids);
    ids.0
}

struct Renamed<'a>(std::slice::Iter<'a, String>);

impl<B: Backend> ModuleMapper<B> for Renamed<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let wanted = self.0.next().and_then(|id| ParamId::try_deserialize(id));
        let (id, value, mapper) = param.consume();
        Param::from_mapped_value(wanted.unwrap_or(id), value, mapper)
    }
}

/// The same parameters under the ids of [`parameter_ids`].
pub(super) fn with_ids<B: Backend, M: Module<B>>(model: M, ids: &[String]) -> M {
    model.map(&mut Renamed(ids.iter()))
}

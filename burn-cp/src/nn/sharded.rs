//! A model that is run by several ranks together.

use burn::{
    module::{AutodiffModule, Devices, Module, ModuleMapper, ModuleVisitor},
    tensor::{
        Tensor,
        backend::{AutodiffBackend, Backend},
    },
};

use super::{AttentionAudit, ParameterError, SequenceModel, check_parameters};
use crate::{
    attention::ContextParallelBackend,
    sharder::{ContextParallel, CpStep, ModelCapabilities, StepError},
};

/// A model whose ranks have been checked to start alike. It is a module like the one it wraps: same record, same parameters.
///
/// It is given no step that holds what its model does not declare to support: [`SequenceModel::forward`] then returns
/// [`StepError::Unsupported`] on every rank, without having run the model.
#[derive(Debug, Clone)]
pub struct SequenceSharded<M> {
    model: M,
}

impl<M> SequenceSharded<M> {
    /// Wraps this rank's model. Every rank of the run's loss group must call it, each with parameters of its own
    /// (`model.clone().fork(device)`, after every parameter has been materialised).
    ///
    /// # Errors
    /// The configuration asks for what the model does not declare, or sequences are sharded and the model holds attention of
    /// `burn::nn` that was not converted: found before anything is sent. Ranks that start with different parameters, or share
    /// autodiff leaves. The same error on all of them.
    pub fn new<B>(model: M, cp: &ContextParallel) -> Result<Self, ParameterError>
    where
        B: ContextParallelBackend,
        M: Module<B> + SequenceModel<B>,
    {
        Self::with_audit(model, cp, &AttentionAudit::new())
    }

    /// [`Self::new`] for a model in which some attention of `burn::nn` is meant to stay as it is, such as that of a vision tower,
    /// which attends within one frame.
    ///
    /// # Errors
    /// As [`Self::new`], for what `audit` does not allow.
    pub fn with_audit<B>(
        model: M,
        cp: &ContextParallel,
        audit: &AttentionAudit,
    ) -> Result<Self, ParameterError>
    where
        B: ContextParallelBackend,
        M: Module<B> + SequenceModel<B>,
    {
        SequenceModel::<B>::capabilities(&model).check_config(cp.config(), cp.group().size())?;
        if cp.group().size() > 1 {
            audit.check(&model)?;
        }
        check_parameters(&model, cp.loss_group())?;
        Ok(Self { model })
    }

    /// Wraps a model without the audit, and without comparing it to the other ranks'. For ranks that differ on purpose.
    pub fn unchecked(model: M) -> Self {
        Self { model }
    }

    /// The wrapped model.
    pub fn inner(&self) -> &M {
        &self.model
    }

    /// Takes the wrapped model out.
    pub fn into_inner(self) -> M {
        self.model
    }
}

impl<B: ContextParallelBackend, M: SequenceModel<B>> SequenceModel<B> for SequenceSharded<M> {
    fn forward(&self, step: &CpStep<B>) -> Result<Tensor<B, 3>, StepError> {
        self.capabilities().check_step(step)?;
        self.model.forward(step)
    }

    fn capabilities(&self) -> ModelCapabilities {
        self.model.capabilities()
    }
}

impl<B: Backend, M: Module<B>> Module<B> for SequenceSharded<M> {
    type Record = M::Record;

    fn collect_devices(&self, devices: Devices<B>) -> Devices<B> {
        self.model.collect_devices(devices)
    }

    fn fork(self, device: &B::Device) -> Self {
        Self {
            model: self.model.fork(device),
        }
    }

    fn to_device(self, device: &B::Device) -> Self {
        Self {
            model: self.model.to_device(device),
        }
    }

    fn visit<V: ModuleVisitor<B>>(&self, visitor: &mut V) {
        self.model.visit(visitor);
    }

    fn map<P: ModuleMapper<B>>(self, mapper: &mut P) -> Self {
        Self {
            model: self.model.map(mapper),
        }
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self {
            model: self.model.load_record(record),
        }
    }

    fn into_record(self) -> Self::Record {
        self.model.into_record()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> AutodiffModule<B> for SequenceSharded<M> {
    type InnerModule = SequenceSharded<M::InnerModule>;

    fn valid(&self) -> Self::InnerModule {
        SequenceSharded {
            model: self.model.valid(),
        }
    }

    fn from_inner(module: Self::InnerModule) -> Self {
        Self {
            model: M::from_inner(module.model),
        }
    }
}

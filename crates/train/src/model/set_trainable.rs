//! Freezing and unfreezing of parameters after `prepare`, the same on all ranks.

use std::collections::HashSet;
use std::sync::atomic::Ordering;

use brigade_optim::Optimizer;
use brigade_torch::{Error, NamedTensor, Result, clear_gradient};
use serde::{Deserialize, Serialize};

use super::PreparedModel;

/// A rank's request to freeze or unfreeze, with the reason why it cannot be granted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Request {
    /// The method with its arguments.
    call: String,
    /// Names of the parameters that would be trained.
    trained: Vec<String>,
    problem: Option<String>,
}

impl<M> PreparedModel<M> {
    /// Freezes (`false`) or unfreezes (`true`) the parameters whose whole name matches a pattern: `*` stands for any
    /// characters, dots included, `?` for one. Returns the number of matching parameters.
    ///
    /// Every rank calls it with the same arguments, between an optimizer's step and the next forward. What depends on
    /// the set of trained parameters is rebuilt: the reducer with its communication hook (whose state is carried over),
    /// the groups of every optimizer that this Accelerator has prepared and that steps this model, and the list of
    /// tensors in checkpoints. An unfrozen parameter joins the optimizer's group that matches its name; a frozen one
    /// leaves it, and its state (momentum and the like) is dropped. Gradients are cleared. A program that resumes from
    /// a checkpoint freezes the same parameters before `load_state`.
    ///
    /// ```
    /// use brigade_models::Cnn;
    /// use brigade_nn::Model;
    /// use brigade_optim::{Adam, Group};
    /// use brigade_train::Accelerator;
    ///
    /// let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    /// let model = Model::new(Cnn::new)?;
    /// let optimizer = Adam::default().group(Group::matching("module1.*").lr(1e-4)).build(&model)?;
    /// let (mut model, optimizer) = accelerator.prepare((model, optimizer))?;
    /// assert_eq!(model.set_trainable("module1.*", false)?, 4);
    /// assert_eq!(optimizer.groups()?.len(), 1);
    /// model.set_trainable("module1.*", true)?;
    /// assert_eq!(optimizer.groups()?.len(), 2);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`brigade_torch::ErrorKind::InvalidArgument`], on every rank and with nothing changed: no parameter matches, the
    /// ranks differ in their arguments, a window of accumulation has begun, or an optimizer's rule does not support an
    /// unfrozen parameter. [`brigade_torch::ErrorKind::Communication`] when a peer is gone.
    #[track_caller]
    pub fn set_trainable(&mut self, pattern: &str, trainable: bool) -> Result<usize> {
        let wildcard = wildmatch::WildMatch::new(pattern);
        let parameters = self.local_parameters();
        let matching = |parameter: &NamedTensor| wildcard.matches(&parameter.name);
        let trained = |parameter: &NamedTensor| {
            if matching(parameter) { trainable } else { parameter.tensor.requires_grad() }
        };
        let count = parameters.iter().filter(|parameter| matching(parameter)).count();
        let unknown = (count == 0).then(|| {
            let names: Vec<&str> = parameters.iter().take(8).map(|it| it.name.as_str()).collect();
            format!("no parameter matches; there are {}", names.join(", "))
        });
        let call = format!("set_trainable({pattern:?}, {trainable})");
        self.train_those(&parameters, trained, call, unknown)?;
        Ok(count)
    }

    /// Unfreezes the parameters of these names and freezes all others, as [`PreparedModel::set_trainable`] does.
    ///
    /// # Errors
    /// Returns the same errors as [`PreparedModel::set_trainable`], also for a name that the model lacks.
    #[track_caller]
    pub fn train_only(&mut self, names: &HashSet<String>) -> Result<()> {
        let parameters = self.local_parameters();
        let known: HashSet<&String> = parameters.iter().map(|parameter| &parameter.name).collect();
        let unknown = names.iter().filter(|name| !known.contains(name)).min();
        let unknown = unknown.map(|name| format!("the model has no parameter `{name}`"));
        let trained = |parameter: &NamedTensor| names.contains(&parameter.name);
        self.train_those(&parameters, trained, "train_only".to_owned(), unknown)
    }

    /// Trains the parameters for which `trained` is `true`, and freezes the others. `parameters` are all of the
    /// model's; `problem` is the reason why this rank cannot do so.
    #[track_caller]
    fn train_those(
        &mut self,
        parameters: &[NamedTensor],
        trained: impl Fn(&NamedTensor) -> bool,
        call: String,
        problem: Option<String>,
    ) -> Result<()> {
        let optimizers: Vec<Optimizer> = self.context.registry.optimizers();
        let concerned = optimizers.into_iter().filter(|it| it.concerns(parameters));
        let mut concerned: Vec<Optimizer> = concerned.collect();
        let refusal = || {
            let mut checks = concerned.iter().map(|it| it.check_trained(parameters, &trained));
            checks.find_map(Result::err).map(|error| error.to_string())
        };
        let in_window = self.context.accumulator.position() > 0;
        let begun = "a window of accumulated gradients has begun; call it after the step";
        let problem = problem.or_else(|| in_window.then(|| begun.to_owned())).or_else(refusal);
        self.agree(Request {
            call,
            trained: parameters.iter().filter(|it| trained(it)).map(|it| it.name.clone()).collect(),
            problem,
        })?;
        for optimizer in &mut concerned {
            optimizer.set_trained(parameters, &trained)?;
        }
        for parameter in parameters {
            clear_gradient(&parameter.tensor)?;
            let _ = parameter.tensor.shallow_clone().f_requires_grad_(trained(parameter))?;
        }
        if let Some(sharded) = &self.sharded {
            sharded.update_trained()?;
        }
        let state = match self.hook_state() {
            Some(hook) => Some(hook.state_dict()?),
            None => None,
        };
        self.reduction = self.context.reduce(&self.model)?;
        if let (Some(hook), Some(state)) = (self.hook_state(), state) {
            hook.carry_over(&state)?;
        }
        self.inner.replace_state(&self.model, self.reduction.hook.clone());
        self.inner.buffers_differ.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Compares the requests of all ranks, and returns the same outcome on each.
    #[track_caller]
    fn agree(&self, request: Request) -> Result<()> {
        let all = match self.context.job.group() {
            Some(group) => group.at(std::panic::Location::caller()).all_gather_object(&request)?,
            None => vec![request],
        };
        let say = |Request { call, trained, .. }: &Request| {
            format!("{call} with {} trained", trained.len())
        };
        let differs = |it: &Request| (&it.call, &it.trained) != (&all[0].call, &all[0].trained);
        if let Some(rank) = all.iter().position(differs) {
            return Err(Error::invalid_argument(format!(
                "the ranks differ, and nothing was changed: rank 0 called {}, rank {rank} {}; call it with \
                 the same arguments on every rank",
                say(&all[0]),
                say(&all[rank])
            )));
        }
        let problem = |(rank, it): (usize, &Request)| Some((rank, it.problem.clone()?));
        match all.iter().enumerate().find_map(problem) {
            None => Ok(()),
            Some((rank, problem)) => Err(Error::invalid_argument(format!(
                "{} on rank {rank}: {problem}; nothing was changed",
                all[0].call
            ))),
        }
    }
}

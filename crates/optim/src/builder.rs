//! Macro that generates an optimizer's settings from one row for each hyperparameter.

/// Declares the settings of an optimizer: the type, its defaults, a setter for each row, and `build`.
///
/// `options` sets the learning rate and the weight decay: `options: …` implements [`Default`], `options(lr): …` adds
/// `new(lr)`. A row `name: type = default` is a field with a setter; its default is added to the doc. A row without a
/// doc must be one of the hyperparameters of [`setter`](setter!). Rows in `private { … }` have no setter. The file
/// implements `fn rule(&self) -> Result<(impl Rule, f64)>`, which checks the numbers and returns the rule and the
/// momentum.
macro_rules! builder {
    (
        $(#[$doc:meta])*
        pub struct $builder:ident {
            options $(($lr:ident))?: $options:expr,
            $($(#[$row_doc:meta])* $field:ident: $kind:tt = $default:expr,)*
        }
        $(private { $($private:ident: $private_kind:ty = $private_default:expr,)* })?
    ) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq)]
        #[must_use]
        pub struct $builder {
            options: $crate::options::Options,
            $($field: $kind,)*
            $($($private: $private_kind,)*)?
        }

        $crate::builder::constructor! { $builder ($($lr)?) Self {
            options: $options,
            $($field: $default,)*
            $($($private: $private_default,)*)?
        } }

        impl $builder {
            $($crate::builder::setter! { [$(#[$row_doc])*] $field $kind = $default })*

            /// Builds the optimizer for the trained parameters of a model, or for a list of named parameters.
            ///
            /// # Errors
            /// [`brigade_torch::ErrorKind::InvalidArgument`] for a number out of range, a
            /// model without a trained parameter, and a group whose pattern matches no parameter.
            pub fn build(
                &self,
                parameters: &(impl brigade_torch::Trainable + ?Sized),
            ) -> brigade_torch::Result<$crate::Optimizer> {
                let (rule, momentum) = self.rule()?;
                $crate::Optimizer::from_options(&self.options, rule, momentum, parameters)
            }
        }

        $crate::options::common_options!(impl $builder);

        impl $crate::OptimizerSettings for $builder {
            fn settings_lr(&self) -> f64 {
                self.options.lr
            }

            fn build_with(
                &self,
                parameters: &[brigade_torch::NamedTensor],
                overrides: $crate::Overrides,
            ) -> brigade_torch::Result<$crate::Optimizer> {
                let mut settings = self.clone();
                overrides.apply(&mut settings.options);
                settings.build(parameters)
            }
        }
    };
}
pub(crate) use builder;

/// Constructor of the settings: `Default`, or `new` if the learning rate has no default.
macro_rules! constructor {
    ($builder:ident () $settings:expr) => {
        impl Default for $builder {
            fn default() -> Self {
                $settings
            }
        }
    };
    ($builder:ident ($lr:ident) $settings:expr) => {
        impl $builder {
            /// Returns the default settings with this learning rate.
            pub fn new($lr: f64) -> Self {
                $settings
            }
        }
    };
}
pub(crate) use constructor;

/// Setter of a row. The first rows are the hyperparameters that several optimizers have.
macro_rules! setter {
    ([] betas $kind:tt = $default:expr) => {
        $crate::builder::setter! { [
            /// Sets the decay rates of the running means of the gradient and of its square.
        ] betas $kind = $default }
    };
    ([] eps $kind:tt = $default:expr) => {
        $crate::builder::setter! { [
            /// Sets the number that is added to the denominator.
        ] eps $kind = $default }
    };
    ([] momentum $kind:tt = $default:expr) => {
        $crate::builder::setter! { [
            /// Sets the momentum factor.
        ] momentum $kind = $default }
    };
    ([] nesterov $kind:tt = $default:expr) => {
        $crate::builder::setter! { [
            /// Switches Nesterov momentum on or off.
        ] nesterov $kind = $default }
    };
    ([] maximize $kind:tt = $default:expr) => {
        $crate::builder::setter! { [
            /// Maximises the objective instead of minimising it.
        ] maximize $kind = $default }
    };
    ([$($doc:tt)+] $field:ident (f64, f64) = $default:expr) => {
        $($doc)+
        #[doc = concat!("Defaults to `", stringify!($default), "`.")]
        pub fn $field(mut self, first: f64, second: f64) -> Self {
            self.$field = (first, second);
            self
        }
    };
    ([$($doc:tt)+] $field:ident (f64, f64, f64) = $default:expr) => {
        $($doc)+
        #[doc = concat!("Defaults to `", stringify!($default), "`.")]
        pub fn $field(mut self, a: f64, b: f64, c: f64) -> Self {
            self.$field = (a, b, c);
            self
        }
    };
    ([$($doc:tt)+] $field:ident $kind:tt = $default:expr) => {
        $($doc)+
        #[doc = concat!("Defaults to `", stringify!($default), "`.")]
        pub fn $field(mut self, $field: $kind) -> Self {
            self.$field = $field;
            self
        }
    };
}
pub(crate) use setter;

/// Adds the choice between the two kinds of weight decay, for optimizers that have both.
macro_rules! decoupled_weight_decay {
    ($builder:ident) => {
        impl $builder {
            /// Sets whether weight decay is decoupled: before each step the weights are multiplied by 1 minus the
            /// learning rate times the weight decay, instead of adding the decay to the gradient. Defaults to `true`
            /// for LAMB, LARS and QHAdam, and to `false` for the other optimizers.
            pub fn decoupled_weight_decay(mut self, on: bool) -> Self {
                use $crate::options::WeightDecay;
                self.options.decay = if on { WeightDecay::Decoupled } else { WeightDecay::Added };
                self
            }
        }
    };
}
pub(crate) use decoupled_weight_decay;

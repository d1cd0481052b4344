//! The optimizers, one file each: settings with the hyperparameters, and a rule with the arithmetic.

mod adafactor;
mod adagrad;
mod adam;
mod lamb;
mod lars;
mod muon;
mod qhadam;
mod radam;
mod rmsprop;
mod sgd;

pub use muon::MuonRate;

use crate::optimizer::OptimizerSettings;

/// Defines the list of all optimizers: a row for each, with the settings that [`all_optimizers`] returns.
macro_rules! optimizers {
    ($($module:ident::$optimizer:ident => $settings:expr,)+) => {
        $(pub use $module::$optimizer;)+

        /// Returns the settings of every optimizer of this crate, under the name of its type, for programs that compare
        /// all optimizers. The settings are the defaults; a learning rate of 0.1 and a momentum are set for optimizers
        /// that have no defaults for them.
        ///
        /// ```
        /// let (name, settings) = &brigade_optim::all_optimizers()[0];
        /// assert_eq!((*name, settings.settings_lr()), ("Adafactor", 0.01));
        /// ```
        pub fn all_optimizers() -> Vec<(&'static str, Box<dyn OptimizerSettings>)> {
            vec![$((stringify!($optimizer), Box::new($settings))),+]
        }
    };
}

optimizers! {
    adafactor::Adafactor => Adafactor::default(),
    adagrad::Adagrad => Adagrad::default(),
    adam::Adam => Adam::default(),
    adam::AdamW => AdamW::default(),
    lamb::Lamb => Lamb::default(),
    lars::Lars => Lars::new(0.1),
    muon::Muon => Muon::default(),
    qhadam::QHAdam => QHAdam::default(),
    radam::RAdam => RAdam::default(),
    rmsprop::RmsProp => RmsProp::default(),
    sgd::Sgd => Sgd::new(0.1).momentum(0.9),
}

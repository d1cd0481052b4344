//! The list of schedules that have a name in text.

use crate::{Schedule, ScheduleError};

/// A schedule that is chosen by name in text, as on the command line, with its parameters.
///
/// ```
/// use brigade_schedule::NamedSchedule;
///
/// let cosine = NamedSchedule::all().iter().find(|named| named.name == "cosine").unwrap();
/// let names: Vec<_> = cosine.parameters.iter().map(|parameter| parameter.name).collect();
/// assert_eq!(names, ["lr", "end-lr"]);
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct NamedSchedule {
    /// Name of the schedule in text.
    pub name: &'static str,
    /// Aliases of the name, such as that of torch's class.
    pub aliases: &'static [&'static str],
    /// Short description of how the learning rate changes.
    pub about: &'static str,
    /// The parameters, in the order of the help. The number of optimizer steps, which all schedules have, is not
    /// among them.
    pub parameters: &'static [Parameter],
    make: fn(&dyn Arguments) -> Result<Schedule, ScheduleError>,
}

/// A parameter of a [`NamedSchedule`].
#[derive(Debug)]
#[non_exhaustive]
pub struct Parameter {
    /// Name of the parameter.
    pub name: &'static str,
    /// Short description of the parameter.
    pub about: &'static str,
    /// Placeholder of the value in the help text.
    pub placeholder: &'static str,
    /// Type of the value.
    pub kind: ParameterKind,
    /// Default value as text. `None` for a required parameter, or one whose default depends on others.
    pub default: Option<&'static str>,
    /// `true` if the parameter must be given.
    pub is_required: bool,
}

/// Types of the values of a [`Parameter`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParameterKind {
    /// A floating-point number.
    Number,
    /// A number of optimizer steps, at least 1.
    Steps,
    /// A non-negative whole number.
    Factor,
    /// List of optimizer steps, separated by commas.
    StepList,
}

/// Values of a schedule's parameters, by name. A parameter that has a default always has a value.
pub trait Arguments {
    /// Returns the number of optimizer steps.
    fn total_steps(&self) -> u64;

    /// Returns the length of the warm-up before the schedule, or `None` without a warm-up.
    fn warmup(&self) -> Option<u64>;

    /// Returns the value of a floating-point parameter, or `None` if it was not set and has no default.
    fn number(&self, name: &str) -> Option<f64>;

    /// Returns the value of a whole-number parameter, or `None` if it was not set and has no default.
    fn whole(&self, name: &str) -> Option<u64>;

    /// Returns the value of a parameter that is a list of steps.
    fn steps(&self, name: &str) -> Vec<u64>;
}

impl NamedSchedule {
    /// Returns all named schedules.
    #[must_use]
    pub fn all() -> &'static [Self] {
        SCHEDULES
    }

    /// Builds the schedule from its arguments.
    ///
    /// # Errors
    /// Returns the errors of its constructor.
    pub fn make(&self, arguments: &dyn Arguments) -> Result<Schedule, ScheduleError> {
        (self.make)(arguments)
    }
}

impl Parameter {
    const fn number(name: &'static str, placeholder: &'static str, about: &'static str) -> Self {
        let kind = ParameterKind::Number;
        Self { name, about, placeholder, kind, default: None, is_required: true }
    }

    const fn rate(name: &'static str, about: &'static str) -> Self {
        Self::number(name, "LR", about)
    }

    const fn whole(name: &'static str, kind: ParameterKind, about: &'static str) -> Self {
        Self { name, about, placeholder: "N", kind, default: None, is_required: true }
    }

    const fn default(self, default: &'static str) -> Self {
        Self { default: Some(default), is_required: false, ..self }
    }

    const fn optional(self) -> Self {
        Self { is_required: false, ..self }
    }
}

/// A row for each schedule of plain numbers. What is made of other schedules, follows a metric or has a struct of
/// settings ([`OneCycle`](crate::OneCycle), [`FitOneCycle`](crate::FitOneCycle)) is not among them.
static SCHEDULES: &[NamedSchedule] = &[
    NamedSchedule {
        name: "constant",
        aliases: &["ConstantLR"],
        about: "The same rate in every step",
        parameters: &[Parameter::rate("lr", "The rate")],
        make: |given| Schedule::constant(number(given, "lr")),
    },
    NamedSchedule {
        name: "linear",
        aliases: &["LinearLR"],
        about: "Changes linearly from one rate to another",
        parameters: &[
            Parameter::rate("start-lr", "The first rate"),
            Parameter::rate("end-lr", "The rate after the last step"),
        ],
        make: |given| {
            let (start, end) = (number(given, "start-lr"), number(given, "end-lr"));
            Schedule::linear(start, end, given.total_steps())
        },
    },
    NamedSchedule {
        name: "cosine",
        aliases: &["CosineAnnealingLR"],
        about: "Falls along half a cosine",
        parameters: &[FIRST, LAST],
        make: |given| {
            let (start, end) = (number(given, "lr"), number(given, "end-lr"));
            Schedule::cosine(start, end, given.total_steps())
        },
    },
    NamedSchedule {
        name: "cosine-restarts",
        aliases: &["CosineAnnealingWarmRestarts", "sgdr"],
        about: "Falls along half a cosine, repeatedly",
        parameters: &[
            Parameter::rate("lr", "The first rate of each period"),
            Parameter::rate("end-lr", "The last rate of each period").default("0"),
            Parameter::whole("first", ParameterKind::Steps, "Steps of the first period"),
            Parameter::whole(
                "factor",
                ParameterKind::Factor,
                "Factor between the lengths of successive periods",
            )
            .default("1"),
        ],
        make: |given| {
            let (start, end) = (number(given, "lr"), number(given, "end-lr"));
            Schedule::cosine_restarts(start, end, whole(given, "first"), whole(given, "factor"))
        },
    },
    NamedSchedule {
        name: "flat-cosine",
        aliases: &["flat-cos", "fit-flat-cos"],
        about: "A constant rate, then a fall along half a cosine (fastai's fit_flat_cos)",
        parameters: &[
            FIRST,
            Parameter::rate(
                "end-lr",
                "The rate after the last step [default: a hundred-thousandth of --lr]",
            )
            .optional(),
            Parameter::number("pct-start", "PART", "Fraction of the steps with the first rate")
                .default("0.75"),
        ],
        make: |given| {
            let lr = number(given, "lr");
            let end = given.number("end-lr").unwrap_or(lr / 1e5);
            Schedule::flat_cosine(lr, end, given.total_steps(), number(given, "pct-start"))
        },
    },
    NamedSchedule {
        name: "polynomial",
        aliases: &["PolynomialLR"],
        about: "Falls with a power of the remaining steps",
        parameters: &[FIRST, LAST, Parameter::number("power", "POWER", "The power").default("1")],
        make: |given| {
            let (start, end) = (number(given, "lr"), number(given, "end-lr"));
            Schedule::polynomial(start, end, given.total_steps(), number(given, "power"))
        },
    },
    NamedSchedule {
        name: "exponential",
        aliases: &["ExponentialLR"],
        about: "Multiplied by the same factor in every step",
        parameters: &[FIRST, FACTOR],
        make: |given| Schedule::exponential(number(given, "lr"), number(given, "gamma")),
    },
    NamedSchedule {
        name: "step",
        aliases: &["StepLR"],
        about: "Multiplied by a factor every so many steps",
        parameters: &[
            FIRST,
            Parameter::whole("every", ParameterKind::Steps, "Steps between changes"),
            FACTOR.default("0.1"),
        ],
        make: |given| {
            Schedule::step(number(given, "lr"), whole(given, "every"), number(given, "gamma"))
        },
    },
    NamedSchedule {
        name: "multi-step",
        aliases: &["MultiStepLR"],
        about: "Multiplied by a factor at chosen steps",
        parameters: &[
            FIRST,
            Parameter {
                placeholder: "N,N,..",
                ..Parameter::whole(
                    "milestones",
                    ParameterKind::StepList,
                    "The steps at which the rate changes",
                )
            },
            FACTOR.default("0.1"),
        ],
        make: |given| {
            let milestones = given.steps("milestones");
            Schedule::multi_step(number(given, "lr"), &milestones, number(given, "gamma"))
        },
    },
    NamedSchedule {
        name: "inverse-sqrt",
        aliases: &[],
        about: "Falls with the square root of the steps, to half after three timescales",
        parameters: &[
            FIRST,
            Parameter::whole(
                "timescale",
                ParameterKind::Steps,
                "Timescale in steps [default: the warm-up's, or 10000]",
            )
            .optional(),
        ],
        make: |given| {
            let timescale = given.whole("timescale").or_else(|| given.warmup()).unwrap_or(10_000);
            Schedule::inverse_sqrt(number(given, "lr"), timescale)
        },
    },
];

const FIRST: Parameter = Parameter::rate("lr", "The first rate");
const LAST: Parameter = Parameter::rate("end-lr", "The rate after the last step").default("0");
const FACTOR: Parameter =
    Parameter::number("gamma", "FACTOR", "Factor by which the rate is multiplied");

/// A number that is there; NaN, which every constructor refuses, of arguments without it.
fn number(arguments: &dyn Arguments, name: &str) -> f64 {
    arguments.number(name).unwrap_or(f64::NAN)
}

/// A whole number that is there; 0, which every constructor refuses, of arguments without it.
fn whole(arguments: &dyn Arguments, name: &str) -> u64 {
    arguments.whole(name).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::collections::BTreeSet;

    use super::*;
    use crate::Curve;

    /// Gives each parameter a value, and notes which were asked for.
    struct Asked<'a>(&'a NamedSchedule, RefCell<BTreeSet<String>>);

    impl Asked<'_> {
        fn note(&self, name: &str, kinds: &[ParameterKind]) {
            let known = self.0.parameters.iter().find(|parameter| parameter.name == name);
            let kind = known.map(|parameter| parameter.kind);
            assert!(kind.is_some_and(|kind| kinds.contains(&kind)), "{}: {name}", self.0.name);
            self.1.borrow_mut().insert(name.to_owned());
        }
    }

    impl Arguments for Asked<'_> {
        fn total_steps(&self) -> u64 {
            100
        }

        fn warmup(&self) -> Option<u64> {
            None
        }

        fn number(&self, name: &str) -> Option<f64> {
            self.note(name, &[ParameterKind::Number]);
            Some(0.5)
        }

        fn whole(&self, name: &str) -> Option<u64> {
            self.note(name, &[ParameterKind::Steps, ParameterKind::Factor]);
            Some(2)
        }

        fn steps(&self, name: &str) -> Vec<u64> {
            self.note(name, &[ParameterKind::StepList]);
            vec![10, 20]
        }
    }

    #[test]
    fn each_row_is_made_of_its_parameters() {
        for named in NamedSchedule::all() {
            let asked = Asked(named, RefCell::default());
            let schedule = named.make(&asked).unwrap();
            assert!(schedule.lr(3).is_finite(), "{}", named.name);
            let parameters = named.parameters.iter().map(|parameter| parameter.name.to_owned());
            assert_eq!(asked.1.into_inner(), parameters.collect(), "{}", named.name);
        }
    }

    #[test]
    fn every_schedule_of_plain_numbers_has_a_row() {
        // serde has the list of the variants.
        let error = serde_json::from_str::<Curve>(r#"{"?": {}}"#).unwrap_err().to_string();
        let (_, variants) = error.split_once("expected one of ").unwrap();
        let others = ["one_cycle", "fit_one_cycle", "warmup", "sequence", "momentum"];
        let plain: BTreeSet<String> = variants
            .split('`')
            .skip(1)
            .step_by(2)
            .filter(|variant| !others.contains(variant))
            .map(str::to_owned)
            .collect();
        let rows = NamedSchedule::all().iter().map(|named| {
            let schedule = named.make(&Asked(named, RefCell::default())).unwrap();
            let curve = serde_json::to_value(schedule.curve()).unwrap();
            curve.as_object().unwrap().keys().next().unwrap().clone()
        });
        assert_eq!(rows.collect::<BTreeSet<_>>(), plain);
    }
}

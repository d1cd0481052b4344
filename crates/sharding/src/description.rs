//! Description of a plan as text, by which ranks detect that their plans differ.

use std::fmt;

use brigade_rank_env::text::escaped;

use crate::{ShardingPlan, Unit, UnitParameter};

/// First difference between the descriptions of two plans.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanDifference {
    /// Differing line of the description of this plan. `None` if this description ends first.
    pub here: Option<String>,
    /// Differing line of the description of the other plan. `None` if that description ends first.
    pub there: Option<String>,
}

impl ShardingPlan {
    /// Returns the plan as text: settings, mesh, a line for each parameter in the order of registration, and one for
    /// each unit. It contains everything that determines the messages of the ranks.
    #[must_use]
    pub fn description(&self) -> String {
        let mut parameters: Vec<(&Unit, &UnitParameter)> = Vec::new();
        for unit in self.units() {
            parameters.extend(unit.parameters.iter().map(|parameter| (unit, parameter)));
        }
        parameters.sort_unstable_by_key(|(_, parameter)| parameter.index);
        let sharding = self.sharding();
        let mut lines = vec![format!("settings {sharding:?}"), format!("mesh {}", self.mesh())];
        lines.extend(parameters.into_iter().map(|(unit, parameter)| describe(unit, parameter)));
        lines.extend(self.units().iter().map(|unit| {
            let modules: Vec<_> = unit.modules.iter().map(|module| quoted(module)).collect();
            format!("unit of {} with reshard {:?}", modules.join(", "), unit.reshard)
        }));
        lines.join("\n")
    }

    /// Returns a hash of [`description`](Self::description), which is the same in all processes (FNV-1a).
    #[must_use]
    pub fn fingerprint(&self) -> u64 {
        fnv(&self.description())
    }

    /// Returns the first line in which another rank's [`description`](Self::description) differs from this plan's, or
    /// `None` if they are equal. If the models differ, it is the first parameter that differs.
    ///
    /// ```
    /// use brigade_checkpoint::Dtype;
    /// use brigade_sharding::{Parameter, Sharding, ShardingPlan};
    ///
    /// let plan = |rows| {
    ///     let parameters = [Parameter::new("head.weight", &[rows, 8], Dtype::F32)];
    ///     ShardingPlan::new(&parameters, &Sharding::zero3(), &Sharding::zero3().mesh(2)?)
    /// };
    /// let (here, there) = (plan(10)?, plan(12)?);
    /// assert_eq!(here.difference(&here.description()), None);
    /// assert_eq!(
    ///     here.difference(&there.description()).unwrap().to_string(),
    ///     "here `head.weight`: [10, 8] F32, trained, in the root; \
    ///      there `head.weight`: [12, 8] F32, trained, in the root"
    /// );
    /// # Ok::<(), brigade_sharding::ShardingError>(())
    /// ```
    #[must_use]
    pub fn difference(&self, there: &str) -> Option<PlanDifference> {
        let here = self.description();
        let (mut here, mut there) = (here.lines(), there.lines());
        loop {
            match (here.next(), there.next()) {
                (None, None) => return None,
                (here, there) if here == there => {}
                (here, there) => {
                    let [here, there] = [here, there].map(|line| line.map(str::to_owned));
                    return Some(PlanDifference { here, there });
                }
            }
        }
    }
}

fn describe(unit: &Unit, parameter: &UnitParameter) -> String {
    let names: Vec<_> = parameter.parameter.names.iter().map(|name| quoted(name)).collect();
    let trained = if parameter.parameter.trained { "trained" } else { "frozen" };
    let unit = if unit.is_root() { "the root".to_owned() } else { quoted(&unit.name) };
    let (names, shape, dtype) =
        (names.join(" = "), &parameter.parameter.shape, parameter.parameter.dtype);
    let kept = if parameter.parameter.keeps_dtype { ", computed in its own type" } else { "" };
    let experts = if parameter.parameter.is_expert { ", experts of this rank" } else { "" };
    format!("{names}: {shape:?} {dtype}, {trained}, in {unit}{kept}{experts}")
}

fn fnv(text: &str) -> u64 {
    let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

/// Formats a name between backticks. Line breaks are escaped, so that a description has one line for each parameter.
fn quoted(name: &str) -> String {
    format!("`{}`", escaped(name))
}

impl fmt::Display for PlanDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |line: &Option<String>| {
            line.as_ref()
                .map_or_else(|| "nothing more".to_owned(), |line| escaped(line).to_string())
        };
        write!(f, "here {}; there {}", side(&self.here), side(&self.there))
    }
}

#[cfg(test)]
mod tests {
    /// Compares with test vectors of the authors of FNV.
    #[test]
    fn the_hash_is_fnv_1a() {
        assert_eq!(super::fnv(""), 0xcbf2_9ce4_8422_2325);
        assert_eq!(super::fnv("a"), 0xaf63_dc4c_8601_ec8c);
        assert_eq!(super::fnv("foobar"), 0x8594_4171_f739_67e8);
    }
}

//! Units of a plan: the parameters that are gathered together.

use std::collections::{BTreeSet, HashMap};

use wildmatch::WildMatch;

use crate::{Note, Parameter, ShardingError, Units};

/// Modules that are gathered together, with their parameters.
#[derive(Debug, Default)]
pub(crate) struct Grouped {
    /// Names of the modules. That of the root is empty.
    pub(crate) modules: Vec<String>,
    /// Indices in the list of parameters, in ascending order.
    pub(crate) parameters: Vec<usize>,
}

/// Groups parameters into units: first the root, which has the parameters of no other unit, then the others by their
/// first parameters.
pub(crate) fn group(
    parameters: &[Parameter],
    units: &Units,
) -> Result<(Vec<Grouped>, Vec<Note>), ShardingError> {
    let modules = match units {
        Units::Blocks | Units::AtLeast(_) => Modules::named_by_the_model(parameters),
        Units::Matching(patterns) => Modules::matching(parameters, patterns)?,
    };
    let (mut grouped, notes) = modules.merge_ties(parameters);
    if let Units::AtLeast(elements) = units {
        grouped = join_neighbours(grouped, parameters, *elements);
    }
    grouped.retain(|unit| !unit.parameters.is_empty());
    Ok((grouped, notes))
}

/// Modules that are units before ties join some of them, with the module of each name of each parameter.
struct Modules {
    names: Vec<String>,
    of: Vec<Vec<usize>>,
}

/// Index of the root among the modules: it runs first.
const ROOT: usize = 0;

impl Modules {
    fn named_by_the_model(parameters: &[Parameter]) -> Self {
        let mut names = Names::default();
        for unit in parameters.iter().filter_map(|parameter| parameter.unit.as_deref()) {
            names.place(unit);
        }
        let of = |parameter: &Parameter| {
            let first = parameter.unit.as_deref().map_or(ROOT, |unit| names.places[unit]);
            let others = parameter.names.iter().skip(1).map(|name| names.around(name));
            std::iter::once(first).chain(others).collect()
        };
        Self { of: parameters.iter().map(of).collect(), names: names.list }
    }

    fn matching(parameters: &[Parameter], patterns: &[String]) -> Result<Self, ShardingError> {
        let compiled: Vec<Vec<WildMatch>> =
            patterns.iter().map(|text| text.split('.').map(WildMatch::new).collect()).collect();
        let mut used = vec![false; patterns.len()];
        let mut names = Names::default();
        let mut of = Vec::new();
        for parameter in parameters {
            let mut places = Vec::new();
            for name in &parameter.names {
                let mut prefixes = compiled.iter().map(|pattern| prefix(pattern, name)).enumerate();
                let found = prefixes.find_map(|(pattern, prefix)| Some((pattern, prefix?)));
                let Some((pattern, module)) = found else {
                    places.push(ROOT);
                    continue;
                };
                if let Some((second, _)) = prefixes.find(|(_, prefix)| prefix.is_some()) {
                    let [first, second] = [pattern, second].map(|place| patterns[place].clone());
                    return Err(ShardingError::Overlap { first, second, name: name.clone() });
                }
                used[pattern] = true;
                places.push(names.place(module));
            }
            of.push(places);
        }
        if let Some(place) = used.iter().position(|used| !used) {
            let known = known(parameters, compiled[place].len());
            return Err(ShardingError::NoMatch { pattern: patterns[place].clone(), known });
        }
        Ok(Self { names: names.list, of })
    }

    /// Merges units that share a tied parameter into one, at the place of the first.
    fn merge_ties(self, parameters: &[Parameter]) -> (Vec<Grouped>, Vec<Note>) {
        let mut into: Vec<usize> = (0..self.names.len()).collect();
        let mut notes = Vec::new();
        for (parameter, places) in parameters.iter().zip(&self.of) {
            let mut roots: Vec<usize> = places.iter().map(|place| find(&into, *place)).collect();
            roots.sort_unstable();
            roots.dedup();
            let Some((first, others)) = roots.split_first() else { continue };
            for other in others {
                into[*other] = *first;
                notes.push(Note::MergedByTie {
                    unit: self.names[*other].clone(),
                    into: self.names[*first].clone(),
                    names: parameter.names.clone(),
                });
            }
        }
        let mut grouped: Vec<Grouped> = self.names.iter().map(|_| Grouped::default()).collect();
        for (module, name) in self.names.into_iter().enumerate() {
            grouped[find(&into, module)].modules.push(name);
        }
        for (index, places) in self.of.iter().enumerate() {
            let place = places.first().copied().unwrap_or(ROOT);
            grouped[find(&into, place)].parameters.push(index);
        }
        grouped.retain(|unit| !unit.modules.is_empty());
        (grouped, notes)
    }
}

/// Modules by name, with the root.
struct Names {
    list: Vec<String>,
    places: HashMap<String, usize>,
}

impl Default for Names {
    fn default() -> Self {
        Self { list: vec![String::new()], places: HashMap::from([(String::new(), ROOT)]) }
    }
}

impl Names {
    fn place(&mut self, name: &str) -> usize {
        if let Some(place) = self.places.get(name) {
            return *place;
        }
        self.list.push(name.to_owned());
        self.places.insert(name.to_owned(), self.list.len() - 1);
        self.list.len() - 1
    }

    /// Returns the innermost module with a parameter of this name.
    fn around(&self, name: &str) -> usize {
        let ends = name.rmatch_indices('.').map(|(end, _)| end);
        ends.filter_map(|end| self.places.get(&name[..end])).next().copied().unwrap_or(ROOT)
    }
}

fn find(into: &[usize], mut place: usize) -> usize {
    while into[place] != place {
        place = into[place];
    }
    place
}

/// Returns the first components of a name, as many as the pattern has, if they match.
fn prefix<'a>(pattern: &[WildMatch], name: &'a str) -> Option<&'a str> {
    let mut components = name.split('.');
    let matches = pattern.iter().all(|part| components.next().is_some_and(|it| part.matches(it)));
    matches.then(|| first_components(name, pattern.len()))
}

fn first_components(name: &str, count: usize) -> &str {
    let end = name.match_indices('.').nth(count - 1).map(|(end, _)| end);
    &name[..end.unwrap_or(name.len())]
}

/// Returns the names that a pattern of so many components could have meant.
fn known(parameters: &[Parameter], components: usize) -> Vec<String> {
    let names = parameters.iter().flat_map(|parameter| &parameter.names);
    let mut seen = BTreeSet::new();
    let prefixes = names.map(|name| first_components(name, components));
    prefixes.filter(|prefix| seen.insert(*prefix)).map(str::to_owned).collect()
}

/// Joins neighbouring units until each has at least `elements` elements. A smaller remainder joins the unit before it.
fn join_neighbours(units: Vec<Grouped>, parameters: &[Parameter], elements: u64) -> Vec<Grouped> {
    let size = |unit: &Grouped| {
        let shapes = unit.parameters.iter().map(|index| &parameters[*index].shape);
        let sizes =
            shapes.map(|shape| shape.iter().fold(1, |all: u64, size| all.saturating_mul(*size)));
        sizes.fold(0, u64::saturating_add)
    };
    let mut units = units.into_iter();
    let mut joined: Vec<Grouped> = units.next().into_iter().collect();
    for unit in units {
        // The root is not a neighbour: it runs around all others.
        let is_small = joined.len() > 1 && joined.last().is_some_and(|last| size(last) < elements);
        match joined.last_mut() {
            Some(last) if is_small => last.append(unit),
            _ => joined.push(unit),
        }
    }
    if joined.len() > 2
        && let Some(last) = joined.pop_if(|last| size(last) < elements)
        && let Some(before) = joined.last_mut()
    {
        before.append(last);
    }
    joined
}

impl Grouped {
    fn append(&mut self, mut next: Self) {
        self.modules.append(&mut next.modules);
        self.parameters.append(&mut next.parameters);
        self.parameters.sort_unstable();
    }
}

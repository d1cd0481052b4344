//! A generated table of people, with columns of fastai's `adult_sample`.

use std::path::Path;

use fastrand::Rng;

use crate::whole;

const WORK: [(&str, f64); 4] =
    [("Private", 0.0), ("Self-emp", 0.3), ("State-gov", 0.1), ("Federal-gov", 0.5)];
const EDUCATION: [(&str, u8); 5] =
    [("HS-grad", 9), ("Some-college", 10), ("Bachelors", 13), ("Masters", 14), ("Doctorate", 16)];
const MARITAL: [(&str, f64); 3] = [("Married", 1.2), ("Never-married", -1.0), ("Divorced", -0.3)];
const OCCUPATION: [(&str, f64); 5] = [
    ("Sales", 0.2),
    ("Craft-repair", -0.2),
    ("Adm-clerical", -0.4),
    ("Prof-specialty", 0.8),
    ("Exec-managerial", 1.0),
];

/// Writes a CSV file of so many people; one that is there stays. Who earns more follows from all columns, with
/// chance. One in fifty has no `education-num`. The same arguments give the same bytes.
///
/// # Errors
/// When the file cannot be written.
pub fn write_people(file: &Path, people: usize) -> anyhow::Result<()> {
    whole(file, |file| {
        let mut random = Rng::with_seed(people as u64);
        let mut writer = csv::Writer::from_path(file)?;
        writer.write_record([
            "age",
            "workclass",
            "education",
            "education-num",
            "marital-status",
            "occupation",
            "hours-per-week",
            "salary",
        ])?;
        for _ in 0..people {
            let (age, hours) = (random.u8(17..80), random.u8(15..=60));
            let (work, by_work) = WORK[random.usize(0..WORK.len())];
            let (education, years) = EDUCATION[random.usize(0..EDUCATION.len())];
            let (marital, by_marital) = MARITAL[random.usize(0..MARITAL.len())];
            let (occupation, by_occupation) = OCCUPATION[random.usize(0..OCCUPATION.len())];
            // More with age up to 50, then less.
            let by_age = 1.0 - (f64::from(age) - 50.0).powi(2) / 400.0;
            let by_years = f64::from(years) / 2.0 - 6.0;
            let by_hours = (f64::from(hours) - 40.0) / 12.0;
            let score = by_work + by_years + by_marital + by_occupation + by_age + by_hours;
            let earns_more = random.f64() < 1.0 / (1.0 + (-2.0 * score).exp());
            let known = random.u8(0..50) > 0;
            writer.write_record([
                age.to_string().as_str(),
                work,
                education,
                if known { years.to_string() } else { String::new() }.as_str(),
                marital,
                occupation,
                hours.to_string().as_str(),
                if earns_more { ">=50k" } else { "<50k" },
            ])?;
        }
        Ok(writer.flush()?)
    })
}

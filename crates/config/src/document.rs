//! Writer of settings files in which every key has a comment that explains it.

use std::fmt::Write as _;

use crate::file::VERSION;
use crate::settings::{ACCELERATE, ENV, Setting, Settings, TABLE, TABLES};

/// Returns the text of a settings file.
///
/// Tables without a value are left out. Reading the text gives the same settings.
///
/// ```
/// use brigade_config::{Settings, document, file};
///
/// let mut settings = Settings::default();
/// settings.set("nproc", "4");
/// let text = document::write(&settings, "");
/// assert!(text.contains("nproc = 4\n"));
/// assert_eq!(file::read("a.toml".as_ref(), &text)?.settings, settings);
/// # Ok::<(), brigade_config::ConfigError>(())
/// ```
#[must_use]
pub fn write(settings: &Settings, heading: &str) -> String {
    let mut text = String::new();
    comment(&mut text, heading);
    comment(&mut text, HEADING);
    line(&mut text, &format!("version = {VERSION}"));
    for table in TABLES {
        let rows: Vec<(&Setting, toml::Value)> = TABLE
            .iter()
            .filter(|setting| setting.table == table.name)
            .filter_map(|setting| Some((setting, settings.value(setting.name)?)))
            .collect();
        if rows.is_empty() {
            continue;
        }
        line(&mut text, "");
        comment(&mut text, table.meaning.trim_start());
        line(&mut text, &format!("[{}]", table.name));
        for (setting, value) in rows {
            comment(&mut text, &setting.meaning());
            line(&mut text, &format!("{} = {value}", setting.name));
        }
    }
    for (table, rows) in [(ACCELERATE, &settings.accelerate), (ENV, &settings.env)] {
        if rows.is_empty() {
            continue;
        }
        line(&mut text, "");
        comment(&mut text, table.meaning.trim_start());
        line(&mut text, &format!("[{}]", table.name));
        // A table of one entry makes toml quote the name and the value as needed.
        for (name, value) in rows {
            let row: toml::Table = [(name.clone(), value.clone().into())].into_iter().collect();
            text.push_str(&row.to_string());
        }
    }
    text
}

fn line(text: &mut String, words: &str) {
    let _ = writeln!(text, "{words}"); // a String takes everything
}

/// Appends a comment, wrapped to the width of a terminal.
fn comment(text: &mut String, words: &str) {
    let mut width = 0;
    for word in words.split_whitespace() {
        if width == 0 || width + 1 + word.len() > COMMENT_WIDTH {
            text.push_str(if width == 0 { "# " } else { "\n# " });
            width = 1;
        } else {
            text.push(' ');
        }
        text.push_str(word);
        width += 1 + word.len();
    }
    if width > 0 {
        text.push('\n');
    }
}

const HEADING: &str = "Every key is also a flag of `brigade launch`, which goes before this file, \
                       and a variable, as BRIGADE_NPROC; `brigade config show` lists them all.";
const COMMENT_WIDTH: usize = 96;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::file;

    #[test]
    fn a_file_explains_itself() {
        let mut settings = Settings::default();
        for (name, text) in [
            ("nproc", "gpu"),
            ("nnodes", "1:4"),
            ("hosts", "a:2,b"),
            ("shutdown-timeout", "2.5"),
            ("rdzv-conf", "join_timeout=60"),
            ("quiet", "true"),
        ] {
            assert!(settings.set(name, text));
        }
        settings.env.insert("A B".into(), "x \"y\"\n".into());
        insta::assert_snapshot!(write(&settings, "Written by a test."), @r##"
        # Written by a test.
        # Every key is also a flag of `brigade launch`, which goes before this file, and a variable, as
        # BRIGADE_NPROC; `brigade config show` lists them all.
        version = 1

        # The ranks of each host.
        [ranks]
        # Ranks per host: a number, gpu, cpu or auto [default: one per GPU, else 1]. gpu starts one rank
        # per GPU or TPU, cpu one per core, auto one per GPU or TPU if there are any, else one per core
        nproc = "gpu"

        # Several hosts: set `hosts` or `hostfile` to start all of them from here, or the other settings
        # to run one command on each.
        [hosts]
        # Hosts to start over ssh, with their numbers of ranks
        hosts = ["a:2", "b"]
        # Number of hosts, or MIN:MAX for an elastic job. Hosts of an elastic job may join, leave or be
        # lost, as long as MIN of them remain
        nnodes = "1:4"

        # Rendezvous of hosts that may join and leave.
        [rendezvous]
        # More options of the rendezvous, such as join_timeout=600. For etcd: protocol=https,
        # cacert=FILE, cert=FILE, key=FILE, user=NAME and password-file=FILE (or the variable
        # BRIGADE_ETCD_PASSWORD)
        rdzv-conf = "join_timeout=60"

        # Behaviour when a rank fails.
        [failure]
        # Time between SIGTERM and SIGKILL when ranks are stopped
        shutdown-timeout = 2.5

        # Output on the terminal and in files.
        [output]
        # Print only what the ranks print, unless the job fails
        quiet = true

        # Variables for every rank.
        [env]
        "A B" = """
        x "y"
        """
        "##);
    }

    /// A text for any setting that it takes.
    fn any_text(expected: &str) -> BoxedStrategy<String> {
        match expected {
            text if text.starts_with("true") => prop_oneof!["true", "false"].boxed(),
            text if text.starts_with("a whole number from 1, or") => prop_oneof![
                Just("auto".to_owned()),
                (1_usize..99).prop_map(|number| number.to_string())
            ]
            .boxed(),
            text if text.ends_with("at least 1") => {
                (1_usize..99).prop_map(|it| it.to_string()).boxed()
            }
            text if text.starts_with("a whole number") => {
                (0_usize..99).prop_map(|it| it.to_string()).boxed()
            }
            text if text.starts_with("a port from 1") => {
                (1_u16..9, 0_u16..9).prop_map(|(a, b)| format!("{a}-{}", a + b)).boxed()
            }
            text if text.starts_with("a port") => {
                any::<u16>().prop_map(|it| it.to_string()).boxed()
            }
            text if text.starts_with("a number of hosts") => {
                (1_usize..9, 0_usize..9).prop_map(|(a, b)| format!("{a}:{}", a + b)).boxed()
            }
            text if text.starts_with("a number of seconds") => (0_u32..100_000)
                .prop_map(|centiseconds| (f64::from(centiseconds) / 100.0).to_string())
                .boxed(),
            text if text.contains("name=value") => "[a-z_]{1,9}=[a-z0-9. ]{0,9}".boxed(),
            text if text.starts_with("a list") => r#"[a-z0-9:"' \\]{1,9}[a-z]"#.boxed(),
            text if text.starts_with("a text") || text.starts_with("a path") => {
                r#"[ -~é\n]{1,20}"#.boxed()
            }
            text if text.starts_with("hosts") => "[a-z]{1,9}:[1-9],[0-9]x".boxed(),
            text if text.starts_with("local ranks") => Just("0,12".to_owned()).boxed(),
            // Words: the first of them.
            text => Just(text.split([',', ' ']).next().unwrap_or_default().to_owned()).boxed(),
        }
    }

    fn any_settings() -> impl Strategy<Value = Settings> {
        let each: Vec<_> = TABLE
            .iter()
            .map(|setting| (Just(setting.name), proptest::option::of(any_text(setting.expected))))
            .collect();
        let env = proptest::collection::btree_map("[A-Z][A-Z_. ]{0,8}X", "[ -~é\n\t]{0,12}", 0..4);
        let texts = ["fsdp-auto-wrap-policy", "deepspeed-config-file", "zero3-init-flag"];
        let accelerate = proptest::collection::btree_map(
            proptest::sample::select(texts.map(str::to_owned).to_vec()),
            "[ -~é\n\t]{0,12}",
            0..4,
        );
        (each, env, accelerate).prop_map(|(each, env, accelerate)| {
            let mut settings = Settings { env, accelerate, ..Settings::default() };
            for (name, text) in each {
                if let Some(text) = text {
                    assert!(settings.set(name, &text), "{name} {text:?}");
                }
            }
            settings
        })
    }

    proptest! {
        #[test]
        fn what_is_written_can_be_read(settings in any_settings()) {
            let text = write(&settings, "A heading.");
            let read = file::read("a.toml".as_ref(), &text);
            prop_assert_eq!(read.map(|it| it.settings).map_err(|it| it.to_string()), Ok(settings), "{}", text);
        }

        #[test]
        fn no_file_is_worth_a_panic(text in any::<String>(), junk in "[\\[\\]=\"a-z0-9\n:{}, -]{0,80}") {
            for text in [text, junk.clone(), format!("version = 1\n{junk}")] {
                let _ = file::read("a.toml".as_ref(), &text);
                let _ = crate::accelerate::read("a.yaml".as_ref(), &text);
                let _ = crate::accelerate::read("a.json".as_ref(), &text);
            }
        }
    }
}

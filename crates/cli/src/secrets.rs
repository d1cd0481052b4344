//! Detection of secret values, which are not shown.

use brigade_config::plugin_arguments::ARGUMENTS;

/// Returns the value of a variable, or a placeholder if its name suggests a secret: output of `--explain` is pasted
/// into bug reports.
pub(crate) fn shown<'a>(name: &str, value: &'a str) -> &'a str {
    let is_secret = name.split('_').any(|word| {
        let word = word.to_ascii_uppercase();
        let singular = word.strip_suffix('S').unwrap_or(&word);
        SECRET_WORDS.contains(&word.as_str()) || SECRET_WORDS.contains(&singular)
    });
    // Such as `MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS`.
    let is_known = ARGUMENTS.iter().any(|it| it.variable == Some(name));
    if is_secret && !is_known && !value.is_empty() { NOT_SHOWN } else { value }
}

const NOT_SHOWN: &str = "(not shown: its name marks it as a secret)";
/// Words between underscores, in the singular.
const SECRET_WORDS: [&str; 13] = [
    "TOKEN",
    "SECRET",
    "PASSWORD",
    "PASSWD",
    "PASS",
    "PASSPHRASE",
    "KEY",
    "APIKEY",
    "CREDENTIAL",
    "CRED",
    "AUTH",
    "COOKIE",
    "DSN",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_secrets() {
        for name in ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_passwords", "PASS"] {
            assert_eq!(shown(name, "abc"), NOT_SHOWN, "{name}");
        }
        for name in [
            "NCCL_DEBUG",
            "KEYBOARD",
            "MONKEY",
            "PASSES",
            "TOKENIZERS_PARALLELISM",
            "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS",
        ] {
            assert_eq!(shown(name, "abc"), "abc", "{name}");
        }
        assert_eq!(shown("HF_TOKEN", ""), "");
    }
}

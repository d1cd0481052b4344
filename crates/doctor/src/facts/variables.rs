//! Facts about the environment variables that control libraries and launchers.

use std::collections::BTreeMap;

use brigade_rank_env::env;

use brigade_hardware::Sources;

/// Returns only variables of a fixed list, since others may contain passwords.
pub(super) fn gather(sources: &Sources) -> BTreeMap<String, String> {
    let matters = |name: &str| {
        env::TABLE.iter().any(|it| it.name == name)
            || NAMES.contains(&name)
            || brigade_hardware::is_visibility_variable(name)
            || PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let chosen = sources.variables().iter().filter(|(name, _)| matters(name));
    chosen.map(|(name, value)| (name.clone(), value.clone())).collect()
}

const NAMES: &[&str] = &[
    "CLOUD_TPU_TASK_ID",
    "CONDA_PREFIX",
    "CUDA_DEVICE_ORDER",
    "CUDA_HOME",
    "CUDA_LAUNCH_BLOCKING",
    "LD_LIBRARY_PATH",
    "LD_PRELOAD",
    "LIBTORCH",
    "LIBTORCH_USE_PYTORCH",
    "NVIDIA_VISIBLE_DEVICES",
    "PJRT_DEVICE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "SSH_CONNECTION",
    "TMPDIR",
    "TP_SOCKET_IFNAME",
    "VIRTUAL_ENV",
];
const PREFIXES: &[&str] = &["GLOO_", "KMP_", "MKL_", "NCCL_", "OMP_", "SLURM_", "TORCH_", "TPU_"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_those_that_matter() {
        let sources = Sources::under("/nowhere")
            .with_variable(env::RANK, "1")
            .with_variable("NCCL_DEBUG", "INFO")
            .with_variable("AWS_SECRET_ACCESS_KEY", "hush");
        let names: Vec<String> = gather(&sources).into_keys().collect();
        assert_eq!(names, ["NCCL_DEBUG", env::RANK]);
    }
}

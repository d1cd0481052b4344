//! Manifests for Kubernetes.

use std::fmt::Write as _;
use std::time::Duration;

use brigade_rank_env::env::BRIGADE_RDZV_SECRET;
use brigade_rank_env::scheduler::{PET_MASTER_ADDR, PET_MASTER_PORT, PET_NNODES, PET_NODE_RANK};

use super::yaml::{list, quoted};
use super::{EmitError, JobFile};

/// Writes a manifest for Kubeflow's training operator, which passes its rank to every pod.
pub(super) fn pytorch_job(job: &JobFile) -> Result<String, EmitError> {
    refuse(job, "a PyTorchJob")?;
    let (min, max) = (*job.nodes.start(), *job.nodes.end());
    let mut yaml = head(job, "kubeflow.org/v1", "PyTorchJob", &job.name()?);
    let _ = writeln!(yaml, "  nprocPerNode: {}", quoted(&job.nproc()));
    yaml.push_str("  runPolicy:\n    cleanPodPolicy: Running\n    backoffLimit: 0\n");
    if let Some(limit) = job.time_limit {
        let _ = writeln!(yaml, "    activeDeadlineSeconds: {}", limit.as_secs());
    }
    let replicas = if min == max {
        vec![("Master", 1), ("Worker", max - 1)]
    } else {
        yaml.push_str("  elasticPolicy:\n    rdzvBackend: c10d\n");
        let _ = writeln!(yaml, "    minReplicas: {min}\n    maxReplicas: {max}");
        vec![("Worker", max)]
    };
    yaml.push_str("  pytorchReplicaSpecs:\n");
    let pod = pod(job, "pytorch", &[])?;
    for (kind, count) in replicas.into_iter().filter(|(_, count)| *count > 0) {
        let _ = writeln!(yaml, "    {kind}:\n      replicas: {count}\n      restartPolicy: Never");
        let _ = writeln!(yaml, "      template:\n        spec:");
        indent(&mut yaml, 10, &pod);
    }
    Ok(yaml)
}

/// Writes a manifest for JobSet, which gives every pod an index and a name.
pub(super) fn job_set(job: &JobFile) -> Result<String, EmitError> {
    refuse(job, "a JobSet")?;
    let (min, max) = (*job.nodes.start(), *job.nodes.end());
    if min != max {
        return Err(EmitError::NotElastic { min, max });
    }
    let name = job.name()?;
    let mut yaml = head(job, "jobset.x-k8s.io/v1alpha2", "JobSet", &name);
    yaml.push_str("  network:\n    enableDNSHostnames: true\n");
    yaml.push_str("  replicatedJobs:\n    - name: hosts\n      replicas: 1\n      template:\n");
    let _ =
        writeln!(yaml, "        spec:\n          parallelism: {max}\n          completions: {max}");
    yaml.push_str("          completionMode: Indexed\n          backoffLimit: 0\n");
    if let Some(limit) = job.time_limit {
        let _ = writeln!(yaml, "          activeDeadlineSeconds: {}", limit.as_secs());
    }
    yaml.push_str("          template:\n            spec:\n              restartPolicy: Never\n");
    let nodes = max.to_string();
    let first = format!("{name}-hosts-0-0.{name}");
    let places = [
        (PET_NNODES, Some(nodes.as_str())),
        (PET_NODE_RANK, None),
        (PET_MASTER_ADDR, Some(&first)),
        (PET_MASTER_PORT, Some(JOB_SET_PORT)),
    ];
    indent(&mut yaml, 14, &pod(job, "brigade", if max > 1 { &places } else { &[] })?);
    Ok(yaml)
}

fn refuse(job: &JobFile, kind: &'static str) -> Result<(), EmitError> {
    let options = [("partition", job.partition.is_some()), ("account", job.account.is_some())];
    JobFile::refuse(kind, options)
}

fn head(job: &JobFile, version: &str, kind: &str, name: &str) -> String {
    let mut yaml = "# Submit with: kubectl apply -f FILE\n".to_owned();
    if let Some(secret) = job.guard() {
        // Contains only hexadecimal digits.
        let value = String::from_utf8_lossy(secret.expose());
        let _ = write!(
            yaml,
            "# The launchers of the job's pods authenticate each other with this secret: keep the\n\
             # file to yourself. `kubectl delete -f FILE` removes both.\n\
             apiVersion: v1\nkind: Secret\nmetadata:\n  name: {}\nstringData:\n  \
             {SECRET_KEY}: {}\n---\n",
            quoted(&secret_name(name)),
            quoted(&value),
        );
    }
    let _ = write!(
        yaml,
        "apiVersion: {version}\nkind: {kind}\nmetadata:\n  name: {}\nspec:\n",
        quoted(name)
    );
    yaml
}

/// Returns the name of the Secret of this job.
fn secret_name(job: &str) -> String {
    format!("{job}-rdzv")
}

/// Writes the rest of a pod's `spec`. A variable without a value is the pod's index.
fn pod(job: &JobFile, name: &str, places: &[(&str, Option<&str>)]) -> Result<String, EmitError> {
    let mut command = Vec::new();
    for word in job.launch() {
        let text = word.to_str().ok_or_else(|| EmitError::Unfit {
            what: "the word",
            text: word.to_string_lossy().into_owned(),
            problem: "is not Unicode, which a manifest is",
        })?;
        command.push(literal(text));
    }
    let grace = job.shutdown_timeout + KUBERNETES_SHARE;
    let mut yaml = format!("terminationGracePeriodSeconds: {}\n", grace.as_secs());
    yaml.push_str("containers:\n");
    let _ = writeln!(yaml, "  - name: {name}");
    match &job.image {
        Some(image) => {
            let _ = writeln!(yaml, "    image: {}", quoted(image));
        }
        None => {
            let kind = if job.gpus.is_some() { "cuda" } else { "cpu" };
            let _ = writeln!(
                yaml,
                "    # REPLACE: an image that has brigade and the program (or give --image). Brigade's\n    \
                 # containers/Dockerfile.{kind} builds one: docs/containers.md\n    image: \"REPLACE\""
            );
        }
    }
    let _ = writeln!(yaml, "    command: {}", list(command.iter().map(String::as_str)));
    if !job.env.is_empty() || !places.is_empty() || job.guard().is_some() {
        yaml.push_str("    env:\n");
    }
    if job.guard().is_some() {
        let _ = writeln!(
            yaml,
            "      - name: {BRIGADE_RDZV_SECRET}\n        valueFrom:\n          secretKeyRef:\n            \
             name: {}\n            key: {SECRET_KEY}",
            quoted(&secret_name(&job.name()?))
        );
    }
    for (name, value) in &job.env {
        let _ = writeln!(yaml, "      - name: {name}\n        value: {}", quoted(&literal(value)));
    }
    for (name, value) in places {
        let _ = writeln!(yaml, "      - name: {name}");
        match value {
            Some(value) => {
                let _ = writeln!(yaml, "        value: {}", quoted(value));
            }
            None => {
                let _ = writeln!(yaml, "        valueFrom:\n          fieldRef:");
                let _ = writeln!(yaml, "            fieldPath: {POD_NUMBER}");
            }
        }
    }
    let limits = [
        ("cpu", job.cpus),
        (<&dyn brigade_hardware::Vendor>::default().kubernetes_resource(), job.gpus),
    ];
    if limits.iter().any(|(_, limit)| limit.is_some()) {
        yaml.push_str("    resources:\n      limits:\n");
    }
    for (resource, limit) in limits {
        if let Some(limit) = limit {
            let _ = writeln!(yaml, "        {resource}: {limit}");
        }
    }
    // The default /dev/shm of 64 MiB is too small for NCCL and for data loaders in Python.
    yaml.push_str(
        "    volumeMounts:\n      - name: shm\n        mountPath: /dev/shm\nvolumes:\n  - name: \
         shm\n    emptyDir:\n      medium: Memory\n",
    );
    Ok(yaml)
}

/// Escapes a text: Kubernetes replaces `$(NAME)` in commands and values, and `$$` by a dollar sign.
fn literal(text: &str) -> String {
    text.replace('$', "$$")
}

fn indent(yaml: &mut String, blanks: usize, lines: &str) {
    for line in lines.lines() {
        let _ = writeln!(yaml, "{:blanks$}{line}", "");
    }
}

const SECRET_KEY: &str = "rdzv-secret";
const POD_NUMBER: &str = "metadata.annotations['batch.kubernetes.io/job-completion-index']";
/// Any port that no program in the pod uses: a pod has its own address.
const JOB_SET_PORT: &str = "29500";
/// Time from the launcher's last line to its end.
const KUBERNETES_SHARE: Duration = Duration::from_secs(15);

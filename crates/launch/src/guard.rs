//! Sources of the secret of a job on several hosts, when one command is started per host.
//!
//! With `--hosts` none of this is needed: the launcher generates a secret for each job and sends it through the
//! sessions. Job files that `brigade emit` writes contain their own.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use brigade_rank_env::env::BRIGADE_RDZV_SECRET;
use brigade_rendezvous::{Secret, SecretError, random_name};
use nix::sys::statfs::statfs;

/// Secret of a job and its source, as a text for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guard {
    /// Secret that was found.
    pub secret: Secret,
    /// Source of the secret, as a text.
    pub source: String,
}

/// Possible sources of a job's secret. The first one that has it takes precedence, in the order of the fields.
#[derive(Clone, Copy)]
#[expect(missing_debug_implementations, reason = "it would show the variables")]
pub struct GuardSources<'a> {
    /// Value of `--rdzv-secret-file`.
    pub flag: Option<&'a Path>,
    /// Environment variables of this process. `BRIGADE_RDZV_SECRET` comes next after `flag`.
    pub variables: &'a dyn Fn(&str) -> Option<OsString>,
    /// Path of the secret's file from a settings file or a variable.
    pub setting: Option<&'a Path>,
    /// `true` if a scheduler started one launcher on each host, so that they have its variables and, on most clusters,
    /// the user's home folder in common.
    pub scheduled: bool,
}

impl GuardSources<'_> {
    /// Finds the secret that all launchers of a job share.
    ///
    /// Without any of the settings, a launcher under a scheduler uses the key that Open MPI makes for each job, else a
    /// key file of this user, which is created when it is first needed, in a home folder on a network file system, so
    /// that all hosts have the same. Returns `None` if none of these exists: the rendezvous then has no secret.
    ///
    /// # Errors
    /// The text or file of a setting is not a secret, the file cannot be read, or other users may read it.
    pub fn find(&self) -> Result<Option<Guard>, SecretError> {
        let of_file = |path: &Path| {
            Ok(Some(Guard {
                secret: Secret::from_file(path)?,
                source: format!("the file {}", path.display()),
            }))
        };
        if let Some(path) = self.flag {
            return of_file(path);
        }
        let variable = |name: &str| (self.variables)(name).filter(|value| !value.is_empty());
        if let Some(value) = variable(BRIGADE_RDZV_SECRET) {
            let secret = Secret::new(value.as_encoded_bytes())?;
            return Ok(Some(Guard { secret, source: BRIGADE_RDZV_SECRET.to_owned() }));
        }
        if let Some(path) = self.setting {
            return of_file(path);
        }
        if !self.scheduled {
            return Ok(None);
        }
        if let Some(value) = variable(OPEN_MPI_KEY)
            && let Ok(secret) = Secret::new(value.as_encoded_bytes())
        {
            return Ok(Some(Guard { secret, source: format!("Open MPI ({OPEN_MPI_KEY})") }));
        }
        Ok(self.state_folder().and_then(|folder| of_home(&folder, is_on_network)))
    }

    fn state_folder(&self) -> Option<PathBuf> {
        let variable = |name: &str| {
            let path = PathBuf::from((self.variables)(name)?);
            path.is_absolute().then_some(path)
        };
        let state =
            variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
        Some(state?.join("brigade"))
    }
}

/// Returns the key file in this folder, which is made if it does not exist. `None` if other hosts cannot see the
/// folder, or if it cannot be used: a job without `--rdzv-secret-file` must not fail because of that.
fn of_home(folder: &Path, is_shared: impl Fn(&Path) -> bool) -> Option<Guard> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700).create(folder).ok()?;
    if !is_shared(folder) {
        return None;
    }
    let path = folder.join(KEY_FILE);
    for _ in 0..TRIES {
        match Secret::from_file(&path) {
            Ok(secret) => {
                let source = format!("the file {}", path.display());
                return Some(Guard { secret, source });
            }
            Err(SecretError::Unreadable { source, .. })
                if source.kind() == io::ErrorKind::NotFound => {}
            Err(_) => return None,
        }
        // Another host may create it at the same moment: only one of the files gets the name.
        make(folder, &path).ok()?;
        // A network file system may cache a lookup for a moment.
        thread::sleep(AGAIN);
    }
    None
}

fn make(folder: &Path, path: &Path) -> io::Result<()> {
    let secret = Secret::generate().map_err(io::Error::other)?;
    let temporary = folder.join(random_name(KEY_FILE)?);
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&temporary)?;
    let linked = file
        .write_all(secret.expose())
        .and_then(|()| file.sync_all())
        .and_then(|()| fs::hard_link(&temporary, path));
    let _ = fs::remove_file(&temporary);
    match linked {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    }
}

fn is_on_network(folder: &Path) -> bool {
    statfs(folder).is_ok_and(|about| {
        let kind = about.filesystem_type().0 as u64 & 0xffff_ffff;
        NETWORK.contains(&kind)
    })
}

/// Random 128-bit key that mpirun generates for each job and passes only to that job's processes.
const OPEN_MPI_KEY: &str = "OMPI_MCA_orte_precondition_transports";
const KEY_FILE: &str = "rdzv-secret";
const TRIES: u32 = 40;
const AGAIN: Duration = Duration::from_millis(50);
/// Numbers of network file systems, from statfs(2) and their drivers: NFS, Lustre, GPFS, CephFS, BeeGFS, PanFS, AFS,
/// SMB, GFS2, OCFS2.
const NETWORK: [u64; 12] = [
    0x6969,
    0x0bd0_0bd0,
    0x4750_4653,
    0x00c3_6400,
    0x1983_0326,
    0xaad7_aaea,
    0x5346_414f,
    0x517b,
    0xff53_4d42,
    0xfe53_4d42,
    0x0116_1970,
    0x7461_636f,
];

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const KEY: &str = "0123456789abcdef-0123456789abcdef";

    fn find(
        flag: Option<&Path>,
        variables: &[(&str, &str)],
        setting: Option<&Path>,
        scheduled: bool,
    ) -> Result<Option<String>, SecretError> {
        let variables = |name: &str| {
            let found = variables.iter().find(|it| it.0 == name)?;
            Some(OsString::from(found.1))
        };
        let sources = GuardSources { flag, variables: &variables, setting, scheduled };
        Ok(sources.find()?.map(|guard| {
            let text = String::from_utf8(guard.secret.expose().to_vec()).unwrap();
            format!("{text} from {}", guard.source)
        }))
    }

    #[test]
    fn the_first_source_wins() {
        let folder = tempfile::tempdir().unwrap();
        let [flag, setting] = ["flag", "setting"].map(|name| {
            let path = folder.path().join(name);
            fs::write(&path, format!("the secret of the {name}\n")).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
            path
        });
        let (flag, setting) = (flag.as_path(), setting.as_path());
        let variable = [(BRIGADE_RDZV_SECRET, "the secret of the variable"), (OPEN_MPI_KEY, KEY)];
        let of = |found: Result<Option<String>, SecretError>| found.unwrap().unwrap_or_default();
        let found = of(find(Some(flag), &variable, Some(setting), true));
        assert_eq!(found, format!("the secret of the flag from the file {}", flag.display()));
        let found = of(find(None, &variable, Some(setting), true));
        assert_eq!(found, "the secret of the variable from BRIGADE_RDZV_SECRET");
        let found = of(find(None, &variable[1..], Some(setting), true));
        assert_eq!(found, format!("the secret of the setting from the file {}", setting.display()));
        let found = of(find(None, &variable[1..], None, true));
        assert_eq!(found, format!("{KEY} from Open MPI ({OPEN_MPI_KEY})"));
        // Hosts that were not started by a scheduler need not have it in common.
        assert_eq!(find(None, &variable[1..], None, false).unwrap(), None);
        // A temporary folder is not on a network file system.
        let home = folder.path().to_str().unwrap();
        assert_eq!(find(None, &[("HOME", home)], None, true).unwrap(), None);
    }

    #[test]
    fn what_was_said_and_is_wrong_is_an_error() {
        let short = find(None, &[(BRIGADE_RDZV_SECRET, "short")], None, true).unwrap_err();
        assert!(matches!(short, SecretError::TooShort { length: 5 }), "{short}");
        let missing = find(Some(Path::new("/no/such")), &[], None, false).unwrap_err();
        assert!(matches!(missing, SecretError::Unreadable { .. }), "{missing}");
        // An empty variable counts as unset.
        assert_eq!(find(None, &[(BRIGADE_RDZV_SECRET, "")], None, false).unwrap(), None);
    }

    #[test]
    fn the_key_of_a_home_folder_is_made_once() {
        let home = tempfile::tempdir().unwrap();
        let folder = home.path().join("state/brigade");
        let hosts: Vec<_> = (0..8)
            .map(|_| {
                let folder = folder.clone();
                thread::spawn(move || of_home(&folder, |_| true).unwrap())
            })
            .collect();
        let found: Vec<Guard> = hosts.into_iter().map(|host| host.join().unwrap()).collect();
        assert!(found.iter().all(|guard| *guard == found[0]), "all hosts have the same");
        let path = folder.join(KEY_FILE);
        assert_eq!(found[0].source, format!("the file {}", path.display()));
        let names: Vec<_> =
            fs::read_dir(&folder).unwrap().map(|it| it.unwrap().file_name()).collect();
        assert_eq!(names, [KEY_FILE], "nothing else is left");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
        // A key file that other users may read is not used, and the job continues without it.
        fs::set_permissions(&path, Permissions::from_mode(0o644)).unwrap();
        assert_eq!(of_home(&folder, |_| true), None);
        assert_eq!(of_home(&folder, |_| false), None);
        assert_eq!(of_home(Path::new("/proc/no/such"), |_| true), None);
    }
}

//! Compiles kernels without a device, and keeps what the compiler said about each in `target/kernels`.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::Path;

use kv_gpu::{Error, Image, Program, compile};

/// The compiler's log of a program: registers, spills, warnings. Where the program has been compiled before, from
/// the same texts with the same options by the same compiler, that log is read instead; the image holds no code.
pub fn compiled(program: &Program, architecture: &str) -> Result<Image, Error> {
    let key = program.key(architecture)?;
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).with_file_name("kernels");
    let file = folder.join(format!("{:016x}.log", hasher.finish()));
    let kept = fs::read(&file).ok();
    if let Some(log) = kept.as_ref().and_then(|kept| kept.strip_prefix(&key[..])) {
        return Ok(Image { code: vec![], log: String::from_utf8_lossy(log).into_owned() });
    }
    let Image { log, .. } = compile(program, architecture)?;
    // Where there is no such folder, as on a machine that only runs the tests, nothing is kept.
    let _ = fs::create_dir(&folder);
    if let Ok(mut draft) = tempfile::NamedTempFile::new_in(&folder) {
        let written = draft.write_all(&key).and_then(|()| draft.write_all(log.as_bytes()));
        let _ = written.map(|()| draft.persist(file));
    }
    Ok(Image { code: vec![], log })
}

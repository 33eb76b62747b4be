//! The header is that of the sources. `make header` writes it.

use std::path::Path;

#[test]
fn the_header_is_that_of_the_sources() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let config = cbindgen::Config::from_file(folder.join("cbindgen.toml")).unwrap();
    let mut bytes = vec![];
    cbindgen::generate_with_config(folder, config).unwrap().write(&mut bytes);
    let (path, made) = (folder.join("include/kvc.h"), String::from_utf8(bytes).unwrap());
    if std::env::var_os("KVC_WRITE_HEADER").is_some() {
        std::fs::write(&path, &made).unwrap();
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(checked_in == made, "include/kvc.h is not that of src: run `make header`");
}

//! Messages of the command line about invalid arguments, and its help.

use std::io::Write;
use std::process::Stdio;

use crate::support::kv::{finished, fixture, kv, one_line, refused, run, text, usage_refused};

#[test]
fn arguments_that_do_not_parse_get_a_whole_message() {
    for (case, args, what) in [
        ("an unknown command", &["compress"][..], &["unrecognized subcommand 'compress'", "Usage: kv"][..]),
        ("a command nearly right", &["compar"], &["'compare'"]),
        ("an unknown option", &["compare", "--fast"], &["--fast", "Usage: kv compare"]),
        ("an option nearly right", &["compare", "--contxt", "5"], &["'--context'"]),
        ("an argument that is missing", &["generate"], &["<PROMPT>", "Usage: kv generate"]),
        ("a context that is not a number", &["compare", "--context", "many"], &["many", "--context <N>"]),
        ("a token that is not a number", &["logits", "--tokens", "1,x"], &["'x'", "--tokens <LIST>"]),
        ("a negative context", &["compare", "--context", "-1"], &["'-1'", "--context <N>"]),
        ("a stop string without a text", &["generate", "a", "--stop", ""], &["--stop <TEXT>"]),
        ("a prompt twice", &["generate", "a", "--file", "b"], &["[PROMPT]", "--file"]),
        (
            "a chunk of nothing",
            &["generate", "a", "--chunk", "0"],
            &["--chunk <N>", "must be a whole number from 1 on"],
        ),
        (
            "a method that attends to nothing",
            &["generate", "a", "--method", "streaming:window=0:sinks=0"],
            &["sinks=0 and window=0 leave no token"],
        ),
        (
            "pages of nothing",
            &["generate", "a", "--method", "dense:pages=0"],
            &["pages=0: must be a multiple of 16 tokens, at least one"],
        ),
        ("a pool of nothing", &["generate", "a", "--method", "dense:pages=64:pool=0"], &["pool=0"]),
        ("a device that is none", &["compare", "--device", "gpu"], &["auto, cpu, cuda", "--device"]),
        ("a list of none", &["compare", "--device", "cuda:"], &["auto, cpu, cuda", "cuda:0,1"]),
        ("a list that does not end", &["compare", "--device", "cuda:0,"], &["auto, cpu, cuda", "cuda:0,1"]),
        ("an exchange that is none", &["compare", "--exchange", "mail"], &["'mail'", "nccl, host"]),
        (
            "a size that is none",
            &["compare", "--device-memory", "lots"],
            &["'lots'", "--device-memory <SIZE>", "must be a size, such as 24GiB"],
        ),
        (
            "a negative size",
            &["compare", "--device-memory", "-1"],
            &["'-1'", "--device-memory <SIZE>", "must be a size"],
        ),
        ("a method nearly right", &["generate", "a", "--method", "zak"], &["`zak` (`zack` is one)"]),
    ] {
        usage_refused(case, args, what);
    }
    refused(
        "prompts of cut rows that are coded",
        &["compare", "--methods", "zack:bits=4:prompt=cut"],
        "prompt=cut is for rows without codes",
    );
    refused(
        "chunks on the CPU",
        &["compare", "--device", "cpu", "--chunk", "5"],
        "--chunk is for prompts on a GPU",
    );
    refused(
        "chunks of eval on the CPU",
        &["eval", "--device", "cpu", "--chunk", "5"],
        "--chunk is for prompts on a GPU",
    );
    refused(
        "a limit of what the CPU has not",
        &["eval", "--device", "cpu", "--device-memory", "24GiB"],
        match cfg!(feature = "cuda") {
            true => "--device-memory limits a GPU, but the command runs on the CPU",
            false => "built without the feature `cuda`",
        },
    );
    refused("an argument of 100,000 characters", &[&"a".repeat(100_000)], "aaa...");
}

/// An error names the option at fault and a valid value, before any long work.
#[test]
fn refusals_name_the_option_and_the_way_out() {
    for (args, what) in [
        (&["eval", "--lengths", "64,128,64"][..], "--lengths: 64 is given twice"),
        (&["eval", "--depths", "0.5,0.50"], "--depths: 0.5 is given twice"),
        (
            &["eval", "--methods", "dense", "--lengths", "64", "--trials", "18446744073709551615"],
            "--trials 18446744073709551615: a prompt of 64 tokens (--lengths) has no room for as many facts",
        ),
        (
            &["generate", "a", "--method", "pqcache:offload=no-folder", "--device", "cpu"],
            "; it must be a folder that exists",
        ),
        (
            &["generate", "a", "--method", "hybrid:rows-on=device", "--device", "cpu"],
            "method hybrid: `rows-on=device` has no effect on the CPU",
        ),
        (
            &["compare", "--methods", "dense:pages=64", "--device", "cpu"],
            "method dense: `pages` has no effect on the CPU",
        ),
        (
            &["generate", "a", "--method", "pqcache:held=64", "--device", "cpu"],
            "method pqcache: `held` has no effect on the CPU",
        ),
        (
            &["compare", "--methods", "pqcache:iterations=no-file.json"],
            "must be a whole number from 1 to 4096",
        ),
        (&["eval", "--lengths", "64", "--trials", "16"], "--trials 16: a prompt of 64 tokens cannot be made"),
        (&["eval", "--lengths", "0"], "--lengths and --decode must be at least 1"),
        (&["eval", "--depths", "1.5"], "--depths: 1.5 is not from 0 to 1"),
        (
            &["compare", "--methods", "int4:exact-layers=0+9"],
            "method int4: exact-layers=0+9: layer 9 is none of the model's, 0 to ",
        ),
        (&["compare", "--methods", "million:k=0x8"], "method million: k=0x8: m must not be zero"),
        (&["compare", "--methods", "pqcache:code=3x4"], "method pqcache: code=3x4: dimension "),
        (&["logits", "--text", ""], "there are no tokens: --text is empty"),
        (&["compare", "--json", "-"], "--json -: name a file"),
        (&["compare", "--json", "/nonexistent/x.json"], "--json: /nonexistent/x.json: "),
        (&["calibrate", "/nonexistent/p"], "FILE: /nonexistent/p: "),
        (&["logits", "--tokens", "1", "--model", "no-one/no-model"], "`kv fetch no-one/no-model`"),
        (
            &["compare", "--calibration", "0", "--methods", "million"],
            "too few tokens to calibrate on: 0 of at least 64: pass a longer --text, a larger --calibration, \
             a smaller --context or --decode, or a --profile",
        ),
    ] {
        refused(&args.join(" "), args, what);
    }
    let folder = tempfile::tempdir().unwrap();
    let profile = folder.path().join("profile");
    refused(
        "few tokens",
        &["calibrate", text(&profile), "--tokens", "3"],
        "3 of at least 64: pass a longer --text or more --tokens",
    );
    let short = folder.path().join("short.txt");
    std::fs::write(&short, "Fellow citizens").unwrap();
    refused(
        "a short text",
        &["compare", "--text", text(&short)],
        "are needed: pass a longer --text, or a smaller --context or --decode",
    );
}

/// An option that the others leave without effect is an error, not ignored.
#[test]
fn options_without_effect_are_refused() {
    for (args, what) in [
        (&["generate", "a", "--top-p", "0.9"][..], "--top-p has no effect without --temperature"),
        (&["generate", "a", "--seed", "3"], "--seed has no effect without --temperature"),
        (&["generate", "a", "--top-k", "3"], "--top-k has no effect without --temperature"),
        (&["generate", "a", "--min-p", "0.1"], "--min-p has no effect without --temperature"),
        (
            &["generate", "a", "--profile", "/nowhere"],
            "--profile has no effect on these methods, which need none",
        ),
        (&["compare", "--methods", "dense,int4", "--profile", "/nowhere"], "--profile has no effect"),
        (&["eval", "--methods", "dense", "--profile", "/nowhere"], "--profile has no effect"),
        (&["eval", "--trials", "0", "--seed", "3"], "--seed has no effect with --trials 0"),
    ] {
        refused(&args.join(" "), args, what);
    }
    #[cfg(feature = "store")]
    for option in ["--kv-retry", "--kv-slo"] {
        usage_refused(option, &["generate", "a", option, "5"], &["--kv <URL>"]);
    }
}

/// A prompt may come from standard input, under each of its names; no more of it is read than a prompt takes.
#[test]
fn a_prompt_may_come_from_standard_input() {
    let options = ["--tokens", "4", "--device", "cpu"];
    let with_input = |args: &[&str], input: &[u8]| {
        let mut command = kv(&[&["generate"], args, &options].concat());
        let (mut reader, input) = (command.stdin(Stdio::piped()), input.to_vec());
        reader = reader.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = reader.spawn().unwrap();
        let mut pipe = child.stdin.take().unwrap();
        let writer = std::thread::spawn(move || drop(pipe.write_all(&input))); // it may not be read to its end
        let output = finished("standard input", child);
        writer.join().unwrap();
        output
    };
    let plain = run("plain", kv(&[&["generate", "We, the people"], &options[..]].concat()));
    assert!(plain.status.success() && !plain.stdout.is_empty());
    let mut names = vec![&["-"][..], &["--file", "-"]];
    if cfg!(unix) {
        names.extend([&["--file", "/dev/stdin"][..], &["-f", "/dev/fd/0"]]);
    }
    for args in names {
        let output = with_input(args, b"We, the people\n\n");
        assert!(output.status.success() && output.stderr.is_empty(), "{args:?}: {output:?}");
        assert_eq!(output.stdout, plain.stdout, "{args:?}");
        one_line("no prompt", &with_input(args, b"\n"), 2, "the prompt is empty");
        one_line("no text", &with_input(args, b"\xff\xfe"), 2, "standard input: invalid utf-8");
        let long = vec![b'a'; (8 << 20) + 1];
        one_line("a long text", &with_input(args, &long), 2, "standard input: has more than 8388608 bytes");
    }
}

/// A prompt with the text of BOS at its beginning, as a chat template leaves it, has BOS twice.
#[test]
fn a_second_bos_is_named() {
    let model = fixture("gguf-sentencepiece").join("model.gguf");
    let stderr = |prompt: &str| {
        let args = ["generate", prompt, "--model", text(&model), "--tokens", "1", "--device", "cpu"];
        let output = run(prompt, kv(&args));
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(stderr("<s>the").contains("BOS token twice") && stderr("the").is_empty());
}

/// Without a GPU the default device is the CPU, and one line says why; `--device cpu` says nothing.
#[test]
fn a_device_that_is_not_the_first_choice_is_explained() {
    if run("a GPU", kv(&["generate", "We", "--tokens", "1", "--device", "cuda"])).status.success() {
        return;
    }
    for command in [
        &["generate", "We", "--tokens", "1"][..],
        &["compare", "--context", "64", "--decode", "4", "--methods", "dense"],
        &["eval", "--methods", "dense", "--lengths", "64", "--trials", "0", "--decode", "2"],
    ] {
        let output = run(command[0], kv(command));
        one_line(command[0], &output, 0, "kv: --device auto takes the CPU: ");
        let output = run(command[0], kv(&[command, &["--device", "cpu"]].concat()));
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    }
}

/// The texts on which methods without a profile are calibrated are in the binary, which may be moved away
/// from where it was built.
#[test]
fn the_calibration_texts_are_part_of_the_binary() {
    let binary = std::fs::read(env!("CARGO_BIN_EXE_kv")).unwrap();
    let assets = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("assets");
    let folder = std::fs::read_dir(assets.join("calibration")).unwrap().map(|entry| entry.unwrap().path());
    let texts = folder.filter(|path| path.extension().is_some_and(|extension| extension == "txt"));
    for path in texts.chain([assets.join("sotu-heldout.txt")]) {
        let text = std::fs::read(&path).unwrap();
        let start = &text[..64];
        let mut places = binary.windows(start.len()).enumerate().filter(|(_, window)| *window == start);
        assert!(places.any(|(at, _)| binary[at..].starts_with(&text)), "{}", path.display());
    }
}

#[test]
fn a_profile_takes_several_kinds_of_text_and_names_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| text(&folder.path().join(name)).to_owned();
    let (prose, code) = (path("prose.txt"), path("code.txt"));
    std::fs::write(&prose, "The river was low that summer. ".repeat(100)).unwrap();
    std::fs::write(&code, "fn main() { println!(\"{}\", 6 * 7); }\n".repeat(100)).unwrap();
    let calibrate = |profile: &str, texts: &[&str]| -> (String, serde_json::Value) {
        let json = path("json");
        let args = ["calibrate", profile, "--tokens", "192", "--methods", "cachegen", "--json", &json];
        let output = run("calibrate", kv(&[&args[..], texts].concat()));
        assert!(output.status.success(), "{output:?}");
        let summary = serde_json::from_slice(&std::fs::read(json).unwrap()).unwrap();
        (String::from_utf8(output.stdout).unwrap(), summary)
    };
    let (line, summary) = calibrate(&path("a"), &["--text", &prose, "--text", &code]);
    assert!(line.ends_with("from 192 tokens of prose.txt, code.txt\n"), "{line}");
    let texts = summary["texts"].as_array().unwrap();
    assert!(texts.len() == 2 && texts.iter().all(|text| text["tokens"] == 96), "{summary}");
    let (line, summary) = calibrate(&path("b"), &[]);
    assert!(line.contains("sotu-heldout.txt, lines.txt, code.txt, json.txt"), "{line}");
    assert_eq!(summary["texts"].as_array().unwrap().len(), 7);
}

#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn a_profile_is_not_replaced_and_all_that_it_lacks_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (folder.path().join("old"), folder.path().join("new"));
    let (old, new) = (text(&old), text(&new));
    let calibrate = |file, methods, more: &[&str]| {
        let args = ["calibrate", file, "--tokens", "192", "--methods", methods];
        run("calibrate", kv(&[&args[..], more].concat()))
    };
    assert!(calibrate(old, "cachegen", &[]).status.success());
    let before = std::fs::read(old).unwrap();
    one_line(
        "a profile that is there",
        &calibrate(old, "zack", &[]),
        2,
        "exists: name a new file, or pass --replace",
    );
    assert_eq!(std::fs::read(old).unwrap(), before);
    assert!(calibrate(old, "cachegen:bits=2", &["--replace"]).status.success());
    let list = "dense,zack,cachegen,cachegen:bits=2";
    let compare = |profile| {
        let sizes = ["--context", "64", "--decode", "4", "--device", "cpu"];
        run("compare", kv(&[&["compare", "--methods", list, "--profile", profile], &sizes[..]].concat()))
    };
    let output = compare(old);
    one_line("two methods that lack entries", &output, 2, "profile: holds nothing for `zack");
    let stderr = String::from_utf8(output.stderr).unwrap();
    let (lacking, command) = stderr.split_once(": run `kv calibrate NEW-FILE --methods ").unwrap();
    assert!(lacking.contains(", `cachegen") && !lacking.contains("bits=2"), "{stderr}");
    let methods = command.split('`').next().unwrap();
    assert!(calibrate(new, methods, &[]).status.success(), "{methods}");
    let output = compare(new);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// The levels of a store are in one list with the method of the cache.
#[cfg(feature = "store")]
#[test]
#[ignore = "long: many seconds of a real model; `.ci/run` has it"]
fn all_that_a_profile_lacks_for_a_store_is_named_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| text(&folder.path().join(name)).to_owned();
    let (store, old) = (path("store"), path("old"));
    let calibrate = |file: &str, methods: &str| {
        let args = ["calibrate", file, "--tokens", "192", "--methods", methods];
        assert!(run("calibrate", kv(&args)).status.success(), "{methods}");
    };
    calibrate(&old, "cachegen:bits=4");
    let common = ["--tokens", "100", "--profile"];
    for (args, lacking) in [
        (&["store", "put", &store][..], &["bits=3`", "bits=2`"][..]),
        (
            &["generate", "We", "--device", "cpu", "--kv", &store, "--method", "million"],
            &["`million", "bits=3`", "bits=2`"],
        ),
    ] {
        let with = |profile| run("a profile", kv(&[args, &common, &[profile]].concat()));
        let output = with(old.as_str());
        one_line("levels that are not there", &output, 2, "profile: holds nothing for ");
        let stderr = String::from_utf8(output.stderr).unwrap();
        let (named, command) = stderr.split_once(": run `kv calibrate NEW-FILE --methods ").unwrap();
        assert!(lacking.iter().all(|method| named.contains(method)), "{stderr}");
        let new = path(&format!("for-{}", args[0]));
        calibrate(&new, command.split('`').next().unwrap());
        let output = with(&new);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[test]
fn notes_under_a_table_name_all_settings() {
    let methods = "zack:k=0.5:v=0.5,zack:k=0.75:v=0.75:bits=4";
    let sizes = ["--context", "64", "--decode", "4", "--calibration", "192", "--device", "cpu"];
    let output = run("notes", kv(&[&["compare", "--methods", methods], &sizes[..]].concat()));
    let stdout = String::from_utf8(output.stdout).unwrap();
    let notes: Vec<&str> =
        stdout.lines().filter_map(|line| Some(line.split_once(" also has: ")?.0)).collect();
    assert_eq!(
        notes,
        ["zack k=0.5 v=0.5 basis=closed", "zack k=0.75 v=0.75 basis=closed bits=4"],
        "{stdout}"
    );
    assert!(stdout.lines().all(|line| line == line.trim_end()), "{stdout}");
}

#[test]
fn defaults_of_lists_are_shown_as_they_are_written() {
    let help = String::from_utf8(run("help", kv(&["eval", "--help"])).stdout).unwrap();
    for default in ["512,2048", "0.1,0.5,0.9"] {
        assert!(help.contains(&format!("[default: {default}]")), "{help}");
    }
}

#[test]
fn what_a_build_lacks_is_named_with_its_feature() {
    if cfg!(not(feature = "fetch")) {
        refused("fetch", &["fetch", "a/b"], "`--features fetch`");
    }
    if cfg!(all(feature = "store", not(feature = "s3"))) {
        let what = "s3://caches/eu: needs a build with `--features s3`";
        refused("ls", &["store", "ls", "s3://user:secret@caches/eu"], what);
    }
    if cfg!(not(feature = "tokenizers")) {
        refused("a text", &["generate", "We"], "`--features tokenizers`");
    }
}

#[test]
fn methods_are_listed_once() {
    let out = |args: &[&str]| String::from_utf8(run("help", kv(args)).stdout).unwrap();
    let table = "sinks and window only (StreamingLLM)";
    assert!(out(&["methods"]).contains(table));
    for command in ["compare", "generate", "logits", "eval", "calibrate", "fetch"] {
        assert!(!out(&[command, "--help"]).contains(table), "{command}");
    }
}

#[test]
fn every_help_has_an_example() {
    help_has_an_example(&[]);
}

/// Checks a command's help, and those of the commands that it lists.
fn help_has_an_example(command: &[&str]) {
    let output = run("help", kv(&[command, &["--help"]].concat()));
    let help = String::from_utf8(output.stdout).unwrap();
    let example = help.split_once("\nExample:\n").or(help.split_once("\nExamples:\n"));
    assert!(example.is_some_and(|(_, lines)| lines.starts_with("  kv ")), "{command:?}: {help}");
    let listed = help.split_once("\nCommands:\n").map_or("", |(_, lines)| lines);
    let names = listed.lines().map_while(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").for_each(|name| help_has_an_example(&[command, &[name]].concat()));
}

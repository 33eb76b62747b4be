//! What the command line says: of arguments that it does not understand, and in its help.

#![allow(clippy::unwrap_used, clippy::panic)] // helpers of tests, too

#[path = "support/kv.rs"]
mod support;

use support::{kv, refused, run, usage_refused};

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
        ("a prompt twice", &["generate", "a", "--file", "b"], &["[PROMPT]", "--file"]),
        ("a chunk of nothing", &["generate", "a", "--chunk", "0"], &["--chunk <N>"]),
        ("a device that is none", &["compare", "--device", "gpu"], &["auto, cpu, cuda", "--device"]),
        (
            "a size that is none",
            &["compare", "--device-memory", "lots"],
            &["'lots'", "--device-memory <SIZE>"],
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
        "--device-memory is of a GPU, and none is used",
    );
    refused("an argument of 100,000 characters", &[&"a".repeat(100_000)], "aaa...");
}

#[test]
fn methods_are_listed_once() {
    let out = |args: &[&str]| String::from_utf8(run("help", kv(args)).stdout).unwrap();
    let table = "sinks and window only (StreamingLLM)";
    assert!(out(&["methods"]).contains(table));
    assert!(out(&["--help"]).contains("Example:\n  kv compare"));
    for command in ["compare", "generate", "logits", "eval", "calibrate", "fetch"] {
        let help = out(&[command, "--help"]);
        assert!(!help.contains(table), "{command}");
        assert!(help.contains(&format!("Example:\n  kv {command} ")), "{command}: {help}");
    }
}

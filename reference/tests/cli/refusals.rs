//! What is known from the arguments and the checkpoint's header is refused before the weights are read and
//! before anything is calibrated.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::support::kv::{kv, one_line, run, text};

/// The shipped model's header and tokenizer, next to weights that cannot be read.
fn without_weights() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-llama-12m");
    for name in ["config.json", "tokenizer.json"] {
        std::fs::copy(shipped.join(name), folder.path().join(name)).unwrap();
    }
    std::fs::write(folder.path().join("model.safetensors"), "no weights").unwrap();
    folder
}

/// Checks that a command over a model is refused with `what`, within a second: on a busy machine, in one of
/// three runs.
fn refused_at_once(model: &Path, args: &[&str], what: &str) {
    let args = [args, &["--model", text(model)]].concat();
    let times = (0..3).map(|_| {
        let start = Instant::now();
        one_line(&args.join(" "), &run("a refusal", kv(&args)), 2, what);
        start.elapsed()
    });
    let mut times = times.map(|time| time < Duration::from_secs(1));
    assert!(times.any(|in_time| in_time), "{args:?}: more than a second");
}

#[test]
fn the_weights_cannot_be_read() {
    let model = without_weights();
    for command in [
        &["compare", "--methods", "million", "--device", "cpu"][..],
        &["eval", "--methods", "dense", "--device", "cpu"],
        &["generate", "We", "--device", "cpu"],
        &["calibrate", "no-profile"],
        &["logits", "--text", "We"],
    ] {
        refused_at_once(model.path(), command, "model.safetensors");
    }
}

#[test]
fn what_the_header_rules_out() {
    let model = without_weights();
    let folder = tempfile::tempdir().unwrap();
    let short = folder.path().join("short.txt");
    std::fs::write(&short, "Fellow citizens").unwrap();
    let (short, new) = (text(&short), text(&folder.path().join("new")).to_owned());
    for (args, what) in [
        (&["compare", "--device", "cpu", "--methods", "million:k=3x8"][..], "method million: k=3x8"),
        (&["eval", "--device", "cpu", "--methods", "int4:exact-layers=6"], "layer 6 is none of the model's"),
        (&["generate", "We", "--device", "cpu", "--method", "pqcache:code=3x8"], "method pqcache: code=3x8"),
        (&["calibrate", &new, "--methods", "zack,pqklt:v=3x6"], "method pqklt: v=3x6"),
        (&["calibrate", &new, "--methods", "dense,int4"], "none of these methods needs a profile"),
        (&["calibrate", &new, "--tokens", "63"], "too few tokens to calibrate on: 63 of at least 64"),
        (&["compare", "--device", "cpu", "--context", "16384"], "exceed the context of 16384"),
        (&["eval", "--device", "cpu", "--lengths", "16384"], "exceed the context of 16384"),
        (
            &["eval", "--device", "cpu", "--lengths", "64", "--trials", "16"],
            "--trials 16: a prompt of 64 tokens",
        ),
        (&["generate", "We", "--device", "cpu", "--tokens", "16384"], "exceed the context of 16384"),
        (&["compare", "--device", "cpu", "--text", short], "are needed: pass a longer --text"),
        (&["eval", "--device", "cpu", "--text", short], "are needed: pass a longer --text"),
        (
            &["compare", "--device", "cpu", "--calibration", "63"],
            "too few tokens to calibrate on: 63 of at least 64",
        ),
        (
            &["eval", "--device", "cpu", "--calibration", "63"],
            "too few tokens to calibrate on: 63 of at least 64",
        ),
        (&["compare", "--device", "cpu", "--chunk", "64"], "--chunk is for prompts on a GPU"),
        (&["compare", "--device", "cpu", "--methods", "dense:pages=64"], "`pages` has no effect on the CPU"),
        (&["compare", "--device", "cpu", "--profile", short], "short.txt: is not a profile"),
        (&["generate", "", "--device", "cpu"], "the prompt is empty"),
        (&["generate", "We", "--device", "cpu", "--chat"], "has no chat template"),
        (&["generate", "We", "--repetition-penalty", "0"], "repetition penalty 0 is not a number above 0"),
        (&["logits", "--tokens", "1,999999"], "token 999999 is outside the vocabulary"),
    ] {
        refused_at_once(model.path(), args, what);
    }
    #[cfg(feature = "store")]
    for (args, what) in [
        (&["store", "put", &new, "--tokens", "16385"][..], "--tokens 16385: the text has 13609 tokens"),
        (&["store", "put", &new, "--kv-levels", "million"], "has no bitstream of single layers"),
        (&["store", "put", &new, "--text", short], "a chunk has at least 100 tokens"),
        (&["generate", "We", "--kv", &new, "--kv-keep", "--kv-slo", "1"], "--kv-slo has no effect"),
        (
            &["generate", "We", "--device", "cpu", "--method", "zack", "--kv", &new, "--kv-keep"],
            "--kv: on the CPU method zack",
        ),
    ] {
        refused_at_once(model.path(), args, what);
    }
}

#[test]
fn a_profile_without_the_methods_entries() {
    let folder = tempfile::tempdir().unwrap();
    let profile = text(&folder.path().join("profile")).to_owned();
    let args = ["calibrate", &profile, "--tokens", "192", "--methods", "cachegen"];
    assert!(run("calibrate", kv(&args)).status.success());
    let model = without_weights();
    let what = "profile: holds nothing for `zack";
    for command in ["compare", "eval"] {
        let args = [command, "--device", "cpu", "--methods", "zack,cachegen", "--profile", &profile];
        refused_at_once(model.path(), &args, what);
    }
    let args = ["generate", "We", "--device", "cpu", "--method", "zack", "--profile", &profile];
    refused_at_once(model.path(), &args, what);
}

/// Where there is no GPU, too: they come before it is opened.
#[cfg(feature = "cuda")]
mod on_a_device {
    use super::*;

    /// [`without_weights`] with a text of the header replaced.
    fn edited(from: &str, to: &str) -> tempfile::TempDir {
        let folder = without_weights();
        let path = folder.path().join("config.json");
        let config = std::fs::read_to_string(&path).unwrap();
        assert!(config.contains(from), "config.json has no {from}");
        std::fs::write(path, config.replace(from, to)).unwrap();
        folder
    }

    /// `kv compare`, `kv eval` and `kv generate` refuse a method.
    fn method_refused(model: &Path, spec: &str, what: &str) {
        refused_at_once(model, &["compare", "--device", "cuda", "--methods", spec], what);
        refused_at_once(model, &["eval", "--device", "cuda", "--methods", spec], what);
        refused_at_once(model, &["generate", "We", "--device", "cuda", "--method", spec], what);
    }

    /// Every refusal is in the list that `kv methods` prints, so all of them are tried.
    #[test]
    fn every_setting_of_the_list() {
        let list = String::from_utf8(run("list", kv(&["methods", "--device", "cuda"])).stdout).unwrap();
        let model = without_weights();
        let (mut name, mut running, mut settings) = ("", vec![], 0);
        for line in list.lines().skip(2).filter(|line| !line.is_empty()) {
            if let Some(refused) = line.strip_prefix("    not ") {
                let (setting, reason) = refused.split_once(": ").unwrap();
                let of: &[&str] = if name == "all" { &running } else { &[name] };
                of.iter().for_each(|name| method_refused(model.path(), &format!("{name}:{setting}"), reason));
                settings += 1;
                continue;
            }
            let (of, rest) = line.trim_start().split_once(' ').unwrap();
            name = of;
            match rest.trim_start().split_once(": ") {
                Some((_, reason)) => method_refused(model.path(), name, reason),
                None if rest.trim_start() == "yes" && name != "dense" => running.push(name),
                None => {}
            }
        }
        assert_eq!(
            running,
            ["int4", "pqcache", "sq", "million", "pqklt", "hybrid", "zack", "cachegen"],
            "{list}"
        );
        assert!(settings > 25, "{list}");
    }

    #[test]
    fn codes_that_kernels_do_not_have() {
        let model = without_weights();
        for (spec, what) in [
            ("million:k=8x8", "16 subspaces or more"),
            ("million:v=64x5", "with 4 or 8 bits"),
            ("pqklt:k=128x5", "2, 3 or 4 bits"),
            ("hybrid:k=64x8", "8, 16 or 32 subspaces"),
        ] {
            method_refused(model.path(), spec, &format!("method {}", spec.split(':').next().unwrap()));
            method_refused(model.path(), spec, what);
        }
    }

    #[test]
    fn models_that_no_device_runs() {
        for (from, to, what) in [
            ("\"head_dim\": 128", "\"head_dim\": 96", "heads of 96 components"),
            ("\"model_type\": \"llama\"", "\"model_type\": \"qwen3\"", "normalizes queries and keys"),
        ] {
            let model = edited(from, to);
            method_refused(model.path(), "dense", what);
            refused_at_once(model.path(), &["compare", "--device", "cuda"], what);
        }
    }

    /// Defaults are settings that a device supports: what stops these runs is the lack of a device, or of
    /// weights.
    #[test]
    fn no_default() {
        for model in [without_weights(), edited("\"head_dim\": 128", "\"head_dim\": 64")] {
            for args in [
                &["compare"][..],
                &["eval"],
                &["generate", "We"],
                &["compare", "--methods", "dense,int4,pqcache,million,pqklt,hybrid,sq,zack,cachegen"],
            ] {
                let args = [args, &["--device", "cuda", "--model", text(model.path())]].concat();
                let output = run("defaults", kv(&args));
                let stderr = String::from_utf8_lossy(&output.stderr);
                let stops = ["no CUDA driver", "no NVRTC", "cuInit", "model.safetensors"];
                assert!(stops.iter().any(|stop| stderr.contains(stop)), "{args:?}: {stderr}");
            }
        }
    }

    /// Several devices each have a part of the model: what has no parts, and devices that cannot exchange.
    #[test]
    fn what_several_devices_cannot_share() {
        let model = without_weights();
        let nccl =
            if cfg!(feature = "nccl") { "" } else { "build it with `--features nccl`; --exchange host" };
        for (options, what) in [
            ("--device cuda:0,1,2", "2 KV heads are not divisible among 3 ranks"),
            ("--device cuda:0,1,2,3,4,5,6,7", "4 query heads are not divisible among 8 ranks"),
            ("--device cuda:5,5", "device 5 is given twice"),
            ("--device cuda:98,99", nccl),
            ("--device cuda:98,99 --exchange host", "rank 0: "),
            ("--device cuda --exchange host", "--exchange has no effect on one device"),
            ("--device cpu --exchange nccl", "--exchange has no effect on one device"),
        ] {
            let options: Vec<&str> = options.split(' ').collect();
            for command in [&["compare"][..], &["eval", "--methods", "dense,int4"], &["generate", "We"]] {
                refused_at_once(model.path(), &[command, &options].concat(), what);
            }
            #[cfg(feature = "serve")]
            refused_at_once(model.path(), &[&["serve"], &options[..]].concat(), what);
        }
        let bitstream = "a bitstream is of all heads";
        let several = ["--device", "cuda:0,1"];
        refused_at_once(
            model.path(),
            &[&["compare", "--methods", "cachegen"], &several[..]].concat(),
            bitstream,
        );
        let generate = ["generate", "We", "--method", "cachegen"];
        refused_at_once(model.path(), &[&generate, &several[..]].concat(), bitstream);
        #[cfg(feature = "store")]
        {
            let folder = tempfile::tempdir().unwrap();
            let generate = ["generate", "We", "--kv", text(folder.path())];
            refused_at_once(
                model.path(),
                &[&generate, &several[..]].concat(),
                "--kv: stored caches are of all",
            );
        }
    }
}

//! `kv methods`: the methods, their settings, and what runs on a GPU.

use clap::Args;
use kv_methods::methods_help;
use kv_reference::Result;

use super::Stdout;
use super::device::Choice;

#[derive(Args)]
#[command(after_help = "Example:\n  kv methods\n  kv methods --device cuda\n  \
                  kv compare --methods dense,hybrid:rows=auto:bound=0.05")]
pub struct Methods {
    /// List what runs on this device instead, and what to pass instead of settings that it does not support
    #[arg(long, value_name = "cpu|cuda", default_value_t = Choice::Auto, hide_default_value = true)]
    device: Choice,
}

impl Methods {
    pub fn run(self, out: &mut Stdout) -> Result<()> {
        let text = match self.device {
            Choice::Cuda(_) => on_device()?,
            // The CPU runs every method.
            Choice::Auto | Choice::Cpu => methods_help(),
        };
        out.print(format_args!("{text}\n"));
        Ok(())
    }
}

#[cfg(feature = "cuda")]
fn on_device() -> Result<String> {
    Ok(kv_methods::device_help()?)
}

#[cfg(not(feature = "cuda"))]
fn on_device() -> Result<String> {
    Err(kv_reference::Error::argument(super::device::WITHOUT_CUDA))
}

//! One-line texts for an object store's errors: the request, the status, the cause.

use std::error::Error;
use std::io;

/// The metadata service with the credentials of an EC2 machine; clients without other credentials ask it.
const METADATA: &str = "//169.254.169.254/";
const NO_CREDENTIALS: &str = "no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and none from ";

/// Maximum characters of a cause: more than those of a file's error, with a name of two digests.
const LONGEST: usize = 400;

/// One line about an error of `object_store` at `path`. Its own text has the server's whole answer and the
/// names of all layers that the error has passed through.
pub(super) fn line(path: &str, e: &object_store::Error) -> String {
    let text = e.to_string();
    // The errors of requests have no public type: "Error performing GET URL in 1ms - CAUSE".
    let request = text.split("Error performing ").skip(1).find_map(|rest| {
        let mut words = rest.split(' ');
        let (method, url) = (words.next()?, words.next()?);
        let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
        is_method.then(|| format!("{method} {}", url.split('?').next().unwrap_or_default()))
    });
    match request {
        Some(request) => {
            let asked = if request.contains(METADATA) { NO_CREDENTIALS } else { "" };
            format!("{asked}{}: {}", cut(&request), cut(&answer(&last(e))))
        }
        None if path.is_empty() => cause(e), // the root
        None => format!("{path}: {}", without_file(cause(e), path)),
    }
}

/// The text of an error without the name of the store.
pub(super) fn cause(e: &object_store::Error) -> String {
    cut(&e.source().map_or_else(|| e.to_string(), ToString::to_string))
}

/// The text of a file's error, such as "Unable to open file /store/PATH: REASON", without the file's name, of
/// which `path` is the end.
fn without_file(cause: String, path: &str) -> String {
    let short = || {
        let (before, reason) = cause.split_once(&format!("/{path}: "))?;
        Some(format!("{}: {reason}", before.split_once(" /")?.0))
    };
    short().unwrap_or(cause)
}

/// Whether a server's answer says that the object, and not its bucket, is missing.
pub(super) fn is_missing_key(e: &object_store::Error) -> bool {
    last(e).contains("<Code>NoSuchKey</Code>")
}

/// Whether the system has refused what it will refuse again.
pub(super) fn is_final(e: &object_store::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, PermissionDenied, ReadOnlyFilesystem};
    let mut causes = std::iter::successors(e.source(), |&cause| cause.source());
    causes.any(|cause| {
        let kind = cause.downcast_ref().map(io::Error::kind);
        matches!(kind, Some(FileTooLarge | PermissionDenied | ReadOnlyFilesystem))
    })
}

/// The first cause of an error.
fn last(e: &object_store::Error) -> String {
    let mut cause: &dyn Error = e;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// The status of a server's answer with its code and message from S3's XML body; other causes are unchanged.
fn answer(cause: &str) -> String {
    let Some(answer) = cause.strip_prefix("Server returned non-2xx status code: ") else {
        return cause.to_owned();
    };
    let (status, body) = answer.split_once(": ").unwrap_or((answer, ""));
    let element = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        rest.split_once(&format!("</{name}>")).map(|(text, _)| text)
    };
    match (element("Code"), element("Message")) {
        (Some(code), Some(message)) => format!("{status} ({code}: {message})"),
        (Some(code), None) => format!("{status} ({code})"),
        _ => format!("{status} {body}"),
    }
}

/// Its first line, without control characters, of at most [`LONGEST`] characters.
fn cut(text: &str) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    let mut chars = line.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut shown: String = chars.by_ref().take(LONGEST).collect();
    if chars.next().is_some() {
        shown.push_str("...");
    }
    shown.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(what: &str) -> object_store::Error {
        object_store::Error::Generic { store: "S3", source: what.into() }
    }

    #[test]
    fn requests_have_their_url_and_status() {
        let xml = "<?xml?>\n<Error><Code>AccessDenied</Code><Message>No.</Message></Error>";
        let status = "Server returned non-2xx status code: 403 Forbidden";
        assert_eq!(answer(&format!("{status}: {xml}")), "403 Forbidden (AccessDenied: No.)");
        assert_eq!(answer(&format!("{status}: <Code>A</Code>")), "403 Forbidden (A)");
        assert_eq!(cut(&answer(&format!("{status}: "))), "403 Forbidden");
        assert_eq!(cut(&answer(&format!("{status}: go away\nnow"))), "403 Forbidden go away");
        let refused = "Error performing list request: Error performing GET http://h:1/b?prefix=a in 1ms - no";
        assert!(line("a", &generic(refused)).starts_with("GET http://h:1/b: "));
        let metadata = "Error performing PUT http://169.254.169.254/latest/api/token in 1ms - no";
        assert!(line("a", &generic(metadata)).starts_with("no AWS_ACCESS_KEY_ID and "));
    }

    #[test]
    fn files_are_named_once() {
        let said = "Unable to open file /my store/a/b: Permission denied (os error 13)";
        let named = "a/b: Unable to open file: Permission denied (os error 13)";
        assert_eq!(line("a/b", &generic(said)), named);
        assert_eq!(line("a", &generic(said)), format!("a: {said}"));
        assert_eq!(line("", &generic(said)), said);
    }

    #[test]
    fn what_the_system_refuses_is_not_repeated() {
        let failed = |kind: io::ErrorKind| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::new(object_store::Error::NotFound {
                path: "a".into(),
                source: Box::new(io::Error::from(kind)),
            }),
        };
        assert!(
            is_final(&failed(io::ErrorKind::FileTooLarge))
                && is_final(&failed(io::ErrorKind::PermissionDenied))
        );
        assert!(!is_final(&failed(io::ErrorKind::ConnectionReset)) && !is_final(&generic("denied")));
    }

    #[test]
    fn whatever_is_said_is_one_short_line() {
        assert_eq!(line("a/b", &generic("the disk is full")), "a/b: the disk is full");
        for said in
            ["", "\n", "Error performing ", "Error performing  \u{1b}[0m\n", &"\u{e9}".repeat(100_000)]
        {
            let line = line("a", &generic(said));
            assert!(line.lines().count() == 1 && line.chars().count() < 500, "{line}");
            assert!(!line.contains(char::is_control));
        }
    }
}

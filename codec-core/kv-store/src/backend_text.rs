//! One-line texts for an object store's errors: the request, the status, the cause.

use std::error::Error;
use std::io;

/// The metadata service with the credentials of an EC2 machine; clients without other credentials ask it.
const METADATA: &str = "//169.254.169.254/";
const NO_CREDENTIALS: &str = "no AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, and none from ";

/// Maximum characters of a cause or of a request: more than those of a file's error, with a name of two digests.
const LONGEST: usize = 300;
/// Maximum characters of a server's answer.
const LONGEST_ANSWER: usize = 150;

/// One line about an error of `object_store` at `path`. Its own text has the server's whole answer and the
/// names of all layers that the error has passed through.
pub(crate) fn line(path: &str, e: &object_store::Error) -> String {
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
            format!("{asked}{}: {}", cut(&request, LONGEST), cut(&answer(&last(e)), LONGEST_ANSWER))
        }
        None if path.is_empty() => cause(e), // the root
        None => format!("{path}: {}", without_file(cause(e), path)),
    }
}

/// The text of an error without the name of the store.
pub(crate) fn cause(e: &object_store::Error) -> String {
    cut(&e.source().map_or_else(|| e.to_string(), ToString::to_string), LONGEST)
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
pub(crate) fn is_missing_key(e: &object_store::Error) -> bool {
    last(e).contains("<Code>NoSuchKey</Code>")
}

/// Whether the same request would fail again: an answer that does not depend on the server's load, a folder's
/// system that has refused, or missing credentials.
pub(crate) fn is_final(e: &object_store::Error) -> bool {
    use io::ErrorKind::{Interrupted, ResourceBusy, StaleNetworkFileHandle, TimedOut, WouldBlock};
    if let Some(status) = status(e) {
        return !matches!(status, 408 | 429 | 500 | 502.. if status != 505);
    }
    let mut causes = std::iter::successors(e.source(), |&cause| cause.source());
    match e {
        object_store::Error::Generic { store: "LocalFileSystem", .. } => !causes.any(|cause| {
            let kind = cause.downcast_ref().map(io::Error::kind);
            matches!(kind, Some(Interrupted | ResourceBusy | StaleNetworkFileHandle | TimedOut | WouldBlock))
        }),
        _ => e.to_string().contains(METADATA),
    }
}

/// Whether the server, or this client by its settings, does not implement the request.
pub(crate) fn is_not_implemented(e: &object_store::Error) -> bool {
    matches!(e, object_store::Error::NotImplemented { .. })
        || status(e) == Some(501)
        || last(e).contains("<Code>NotImplemented</Code>")
}

const STATUS: &str = "Server returned non-2xx status code: ";

/// The status of a server's answer.
fn status(e: &object_store::Error) -> Option<u16> {
    last(e).strip_prefix(STATUS)?.split(' ').next()?.parse().ok()
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
    let Some(answer) = cause.strip_prefix(STATUS) else {
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

/// Its first line, without control characters, of at most `longest` characters.
fn cut(text: &str, longest: usize) -> String {
    let line = text.trim().lines().next().unwrap_or_default();
    let mut chars = line.chars().map(|c| if c.is_control() { ' ' } else { c });
    let mut shown: String = chars.by_ref().take(longest).collect();
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
        assert_eq!(cut(&answer(&format!("{status}: ")), 80), "403 Forbidden");
        assert_eq!(cut(&answer(&format!("{status}: go away\nnow")), 80), "403 Forbidden go away");
        let refused = "Error performing list request: Error performing GET http://h:1/b?prefix=a in 1ms - no";
        assert!(line("a", &generic(refused)).starts_with("GET http://h:1/b: "));
        // A long answer does not make a long line, whatever its form.
        let body = "b".repeat(100_000);
        for body in
            [body.clone(), format!("<Code>{body}</Code>"), format!("<Code>A</Code><Message>{body}</Message>")]
        {
            let line =
                line("a", &generic(&format!("Error performing GET http://h:1/b in 1ms - {status}: {body}")));
            assert!(line.chars().count() < 200 && line.ends_with("..."), "{line}");
        }
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
    fn what_would_fail_again_is_not_repeated() {
        let of_folder = |kind: io::ErrorKind| object_store::Error::Generic {
            store: "LocalFileSystem",
            source: Box::new(object_store::Error::NotFound {
                path: "a".into(),
                source: Box::new(io::Error::from(kind)),
            }),
        };
        for kind in [io::ErrorKind::FileTooLarge, io::ErrorKind::PermissionDenied, io::ErrorKind::StorageFull]
        {
            assert!(is_final(&of_folder(kind)));
        }
        assert!(!is_final(&of_folder(io::ErrorKind::StaleNetworkFileHandle)));
        assert!(!is_final(&generic("connection refused")));
        let answered = |status: &str| generic(&format!("{STATUS}{status}: <Code>A</Code>"));
        for status in ["400 Bad Request", "405 Method Not Allowed", "501 Not Implemented"] {
            assert!(is_final(&answered(status)), "{status}");
        }
        for status in
            ["408 Request Timeout", "429 Too Many Requests", "500 I", "503 Slow Down", "504 Gateway"]
        {
            assert!(!is_final(&answered(status)), "{status}");
        }
        assert!(is_final(&generic(
            "Error performing PUT http://169.254.169.254/latest/api/token in 1ms - no"
        )));
        assert!(
            is_not_implemented(&answered("501 Not Implemented")) && !is_not_implemented(&answered("500 I"))
        );
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

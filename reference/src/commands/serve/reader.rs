//! The text of an answer, made of the tokens of the engine as fast as the client reads.

use std::sync::Arc;
use std::time::Duration;

use kv_llama::LogProbabilities;
use kv_llama::serve::{Finish, Token};
use kv_model::{Model, TextStream};
use kv_reference::Result;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::super::stop::StopStrings;
use super::engine::Event;

/// A part of an answer.
#[derive(Default)]
pub struct Part {
    pub text: String,
    /// Of the tokens since the last part, if they were asked for.
    pub scored: Vec<Scored>,
    /// Of the last part.
    pub end: Option<End>,
}

/// How an answer ends.
pub struct End {
    pub finish: std::result::Result<Finish, String>,
    pub tokens: usize, // generated
}

/// A token with its log-probability and the most likely ones in its place.
pub struct Scored {
    pub token: Candidate,
    pub top: Vec<Candidate>,
}

/// A token that may follow, and its log-probability.
pub struct Candidate {
    pub bytes: Vec<u8>,
    pub log_probability: f64,
}

impl Candidate {
    /// Its text; U+FFFD for a part of a character.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }
}

/// How long a client may leave parts unread before its request is dropped.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Parts that wait for the client; tokens wait before them.
const PARTS: usize = 16;

/// Makes the text of a request's tokens. If the client leaves, or reads nothing for as long as `patience`, the
/// request ends.
pub fn read(
    model: Arc<Model>,
    stop: Vec<String>,
    events: Receiver<Event>,
    patience: Duration,
) -> Receiver<Part> {
    let (parts, receiver) = channel(PARTS);
    tokio::spawn(async move {
        if let Err(e) = forward(&model, stop, events, (&parts, patience)).await {
            // Who is there gets it: the channel has been read from, or the client is gone.
            let end = Some(End { finish: Err(e.to_string()), tokens: 0 });
            let _ = parts.send_timeout(Part { end, ..Part::default() }, patience).await;
        }
    });
    receiver
}

async fn forward(
    model: &Model,
    stop: Vec<String>,
    mut events: Receiver<Event>,
    (parts, patience): (&Sender<Part>, Duration),
) -> Result<()> {
    let tokenizer = model.tokenizer()?;
    let (mut stream, mut stop, mut part, mut tokens) =
        (TextStream::new(tokenizer), StopStrings::new(stop), Part::default(), 0);
    let mut finish = loop {
        let event = tokio::select! {
            () = parts.closed() => return Ok(()),
            event = events.recv() => event,
        };
        let token = match event {
            Some(Event::Token(token)) => token,
            Some(Event::End(end)) => break end,
            None => break Err("the engine has failed".into()),
        };
        tokens += 1;
        part.scored.extend(scored(&stream, &token)?);
        part.text.push_str(&stop.push(&stream.push(token.id)?));
        if stop.is_met() {
            break Ok(Finish::Stop);
        }
        if !part.text.is_empty() && parts.send_timeout(std::mem::take(&mut part), patience).await.is_err() {
            return Ok(());
        }
    };
    drop(events); // ends the request
    part.text.push_str(&stop.finish(&stream.finish()));
    if stop.is_met() && finish.is_ok() {
        finish = Ok(Finish::Stop);
    }
    part.end = Some(End { finish, tokens });
    let _ = parts.send_timeout(part, patience).await; // the client may be gone
    Ok(())
}

/// The log-probabilities of a token, if it has any, before it is added to the text.
fn scored(stream: &TextStream<'_>, token: &Token) -> Result<Option<Scored>> {
    let Some(LogProbabilities { token: own, top }) = &token.log_probabilities else { return Ok(None) };
    let candidate =
        |id: u32, log_probability: f64| Ok(Candidate { bytes: stream.bytes(id)?, log_probability });
    let top = top.iter().map(|&(id, log_probability)| candidate(id, log_probability));
    Ok(Some(Scored { token: candidate(token.id, *own)?, top: top.collect::<Result<_>>()? }))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The part that is left of a request whose client reads nothing, and who gave up.
    #[test]
    fn a_client_that_reads_nothing_loses_its_request() {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/tiny-llama-12m");
        let model = Arc::new(Model::load(&shipped).unwrap());
        let token = Token { id: model.tokenizer().unwrap().words()[0], log_probabilities: None };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (events, receiver) = channel(1000);
            let mut parts = read(model, vec![], receiver, Duration::from_millis(100));
            for _ in 0..PARTS + 10 {
                events.send(Event::Token(token.clone())).await.unwrap();
            }
            events.closed().await; // the engine sees that nobody waits
            let mut left = 0;
            while let Some(part) = parts.recv().await {
                assert!(part.end.is_none());
                left += 1;
            }
            assert_eq!(left, PARTS);
        });
    }
}

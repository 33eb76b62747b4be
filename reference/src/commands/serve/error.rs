//! Errors in the shape of OpenAI's API.

use axum::http::header::{CONTENT_TYPE, RETRY_AFTER};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// A request that is refused, or an answer that failed.
pub struct ApiError {
    status: StatusCode,
    kind: &'static str,
    message: String,
    field: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), field: None }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// A field of the request is wrong.
    pub fn field(field: &'static str, message: impl std::fmt::Display) -> Self {
        Self { field: Some(field), ..Self::invalid(format!("{field}: {message}")) }
    }

    /// The request has a body that is too large or broken off.
    pub fn body(status: StatusCode, message: impl Into<String>) -> Self {
        Self::new(status, "invalid_request_error", message)
    }

    /// There is no such thing.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found_error", message)
    }

    /// There is such a route, but not for this method.
    pub fn method() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", "this route takes another method")
    }

    /// All places in the queue are taken.
    pub fn overloaded() -> Self {
        let message = "as many requests as the queue takes are waiting: try again later";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded_error", message)
    }

    /// The engine failed.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// Its JSON.
    pub fn json(&self) -> Value {
        let &Self { kind, ref message, field, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": field, "code": null } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.json());
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A response of JSON.
pub fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

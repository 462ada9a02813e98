//! Chat messages and the template that writes them as one text.

use minijinja::{Environment, Error, ErrorKind};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::PromptError;

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`.
    pub role: String,
    /// What is said and shown.
    pub content: Content,
}

/// What a turn says and shows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Content {
    /// Words only.
    Text(String),
    /// Words, images and videos in order.
    Parts(Vec<Part>),
}

/// An entry of a turn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Part {
    /// Words.
    Text {
        /// The words.
        text: String,
    },
    /// A picture.
    Image {
        /// Path of its file; relative ones count from the folder of the data.
        #[serde(alias = "path")]
        image: String,
    },
    /// A video: a folder of frames, which are taken in the order of their names, or an animated GIF.
    Video {
        /// Path of folder or file; relative ones count from the folder of the data.
        #[serde(alias = "path")]
        video: String,
        /// Frames per second; absent: what the file says, or 24 for a folder, as the reference assumes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        fps: Option<f64>,
    },
}

impl Message {
    /// The entries of the turn that are pictures or videos, in order.
    pub fn media(&self) -> impl Iterator<Item = &Part> {
        let parts = match &self.content {
            Content::Text(_) => &[][..],
            Content::Parts(parts) => parts,
        };
        parts
            .iter()
            .filter(|part| !matches!(part, Part::Text { .. }))
    }
}

/// A model's chat template: Jinja as published models use it, with Python's methods of strings and lists.
#[derive(Debug, Clone)]
pub struct ChatTemplate(Environment<'static>);

impl ChatTemplate {
    /// A template from its source.
    ///
    /// # Errors
    /// It is not well-formed.
    pub fn new(source: String) -> Result<Self, PromptError> {
        let mut environment = Environment::new();
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| -> Result<(), Error> {
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        });
        environment
            .add_template_owned("chat", source)
            .map_err(|error| wrong(&error))?;
        Ok(Self(environment))
    }

    /// The messages as text; with `add_generation_prompt` the head of the assistant's turn stands behind them.
    ///
    /// # Errors
    /// The template refuses the messages.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, PromptError> {
        let template = self.0.get_template("chat").map_err(|error| wrong(&error))?;
        let values = serde_json::json!({
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": Value::Null,
        });
        template.render(values).map_err(|error| wrong(&error))
    }
}

fn wrong(error: &Error) -> PromptError {
    PromptError::Template {
        reason: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What published templates are made of: counters that outlive loops, macros, Python's methods, slices, tests and filters.
    const TEMPLATE: &str = r#"{%- set seen = namespace(images=0) -%}
{%- macro shown(content) -%}
    {%- if content is string -%}{{- content.strip().split('|')[-1].lstrip('\n') -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part -%}
                {%- set seen.images = seen.images + 1 -%}
                {%- if add_vision_id -%}Picture {{ seen.images }}: {%- endif -%}
                <img>
            {%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if messages[::-1][0].role.startswith('assist') -%}answered:{%- endif -%}
{%- for message in messages -%}
    {%- if loop.first and message.role != 'user' -%}{{- raise_exception('a user begins') -}}{%- endif -%}
    [{{ message.role }}|{{ shown(message.content) }}]
{%- endfor -%}
{%- if tools -%}tools{%- endif -%}
{{- ' ' ~ seen.images if messages | length > 1 }}"#;

    fn say(role: &str, content: Content) -> Message {
        Message {
            role: role.into(),
            content,
        }
    }

    #[test]
    fn what_published_templates_use_is_understood() {
        let template = ChatTemplate::new(TEMPLATE.into()).unwrap();
        let parts = vec![
            Part::Image {
                image: "a.png".into(),
            },
            Part::Text {
                text: "what?".into(),
            },
        ];
        let messages = [
            say("user", Content::Parts(parts)),
            say("assistant", Content::Text(" x|\na cat ".into())),
        ];
        let text = template.render(&messages, false).unwrap();
        assert_eq!(text, "answered:[user|<img>what?][assistant|a cat] 1");
        let error = template.render(&messages[1..], false).unwrap_err();
        assert!(error.to_string().contains("a user begins"), "{error}");
        assert!(ChatTemplate::new("{% if %}".into()).is_err());
    }
}

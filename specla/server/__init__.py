"""An OpenAI-compatible server around one engine; needs the extra `server`."""

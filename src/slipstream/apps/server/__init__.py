"""An OpenAI-compatible server over a decoder's scheduler; started by `slipstream serve`."""

"""Silent training errors of a public list, each rebuilt as two small programs."""

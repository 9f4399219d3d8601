"""`faregate demo`: a shop that is killed again and again, and an audit. See README.md in this folder."""

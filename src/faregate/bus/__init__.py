"""The bus: node, context, pipeline, lanes, sending. It talks to the world through ports only."""

"""What the nodes of a bus send and handle, as an AsyncAPI 3 document, and as a page for people.

document = fg.asyncapi.document(bus, title="Shop", version="1.4.0")     # a dict, ready for json.dumps
html = fg.asyncapi.page(document)
"""

from faregate.asyncapi.document import document
from faregate.asyncapi.page import page

__all__ = ["document", "page"]

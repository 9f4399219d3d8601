"""The bus, in a process of its own: `faregate run examples.flask_shop.worker:bus`."""

import logging

import faregate as fg

from .app import ParcelScanned, data_folder

log = logging.getLogger(__name__)
depot = fg.Node("depot", publishes=[ParcelScanned])
tracking = fg.Node("tracking", schema="create table if not exists scans(parcel_id text not null, place text not null)")


@tracking.on(ParcelScanned, source=depot, key="parcel_id")
async def note(scan: ParcelScanned, ctx: fg.Context) -> None:
    """A parcel's scans, in the order in which they were committed."""
    ctx.db.write("insert into scans values (?, ?)", (scan.parcel_id, scan.place))
    log.info("parcel %s is at %s", scan.parcel_id, scan.place)


bus = fg.Bus(f"journal:{data_folder()}/journal", nodes=[depot, tracking], store=f"sqlite:{data_folder()}/depot.db")

"""Jobs and their artifacts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the first tables."""
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(100), nullable=False),
        sa.Column("command", sa.String(32), nullable=False),
        sa.Column("request", sa.Text, nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("idempotency_key", sa.String(255)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("progress", sa.Text, nullable=False),
        sa.Column("created_s", sa.Float, nullable=False),
        sa.Column("started_s", sa.Float),
        sa.Column("finished_s", sa.Float),
        sa.Column("server", sa.String(64)),
        sa.Column("fence", sa.Integer, nullable=False),
        sa.Column("starts_left", sa.Integer, nullable=False),
        sa.Column("lease_until_s", sa.Float),
        sa.Column("exit_code", sa.Integer),
        sa.Column("result", sa.Text),
        sa.Column("error", sa.Text),
        sa.Column("said", sa.Text, nullable=False),
    )
    op.create_index("jobs_of_owner_by_key", "jobs", ["owner", "idempotency_key"], unique=True)
    op.create_index("jobs_by_state", "jobs", ["state", "created_s"])
    op.create_index("jobs_by_owner", "jobs", ["owner", "created_s"])
    op.create_table(
        "artifacts",
        sa.Column("job", sa.String(32), sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("name", sa.String(512), primary_key=True),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Remove them."""
    op.drop_table("artifacts")
    op.drop_table("jobs")

// The environment that this actor plays: Catch, as docs/wire-protocol.md describes it. Replace it by
// what you play.
const [ROWS, COLUMNS] = [10, 5];

export class Catch {
  // Begins an episode.
  reset() {
    this.ball = { row: 0, column: Math.floor(Math.random() * COLUMNS) };
    this.paddle = Math.floor(COLUMNS / 2);
  }

  // action: 0, 1 or 2, to the left, nowhere, to the right.
  step(action) {
    this.ball.row += 1;
    this.paddle = Math.min(COLUMNS - 1, Math.max(0, this.paddle + action - 1));
    const terminated = this.ball.row === ROWS - 1;
    const reward = this.paddle === this.ball.column ? 1 : -1;
    return { reward: terminated ? reward : 0, terminated, truncated: false };
  }

  // Returns the observation: ROWS x COLUMNS bytes.
  observe() {
    const board = Buffer.alloc(ROWS * COLUMNS);
    board[this.ball.row * COLUMNS + this.ball.column] = 1;
    board[(ROWS - 1) * COLUMNS + this.paddle] = 1;
    return board;
  }
}
